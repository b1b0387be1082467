"""The chat page in a real browser, over a real server; some answers are written down."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dsa_compile.server.routes.page import _FILE
from tests.browsing import until
from tests.server.conftest import KEY
from tests.server.serving import PATIENCE, Server, serving

PHONE, LAPTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 800}
CALL = {"index": 0, "id": "call_1", "type": "function"}
SCRIPT: list[dict[str, Any]] = [
    {"role": "assistant", "content": ""},
    *({"reasoning_content": word} for word in ("I need ", "the <b>tool</b>.")),
    {"content": "Let me "},
    {"content": "see."},
    {"tool_calls": [{**CALL, "function": {"name": "weather", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Tests are skipped where there is none."""
    pytest.importorskip("playwright.sync_api")
    from tests.chromium import NoBrowserError, chromium

    try:
        with chromium() as found:
            yield found
    except NoBrowserError as error:
        pytest.skip(str(error))


@contextmanager
def opened(browser: Any, url: str, size: dict[str, int] = LAPTOP, **options: Any) -> Iterator[Any]:
    """The page; it must not complain, nor load anything from elsewhere."""
    page = browser.new_page(viewport=size, **options)
    page.set_default_timeout(PATIENCE * 1000)
    faults: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    until(
        page, "document.getElementById('model').textContent !== 'dsa-serve' || problem.textContent"
    )
    yield page
    page.close()
    assert not [fault for fault in faults if "401" not in fault and "400" not in fault]
    assert not [one for one in asked if not one.startswith((url, "data:"))]


class Scripted:
    """A server that answers with the script, then with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.hold = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None: ...

            def do_GET(self) -> None:
                page = _FILE.read_bytes()
                models = json.dumps({"data": [{"id": "scripted"}]}).encode()
                self._send(page if self.path == "/" else models, self.path == "/")

            def _send(self, data: bytes, html: bool) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/html" if html else "application/json")
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                outer.asked.append(json.loads(self.rfile.read(length)))
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                first = len(outer.asked) == 1
                deltas = SCRIPT if first else [{"content": "It is cold. "}] * 3
                reason = "tool_calls" if first else "stop"
                for number, delta in enumerate([*deltas, {}]):
                    last = number == len(deltas)
                    choice = {"index": 0, "delta": delta, "finish_reason": reason if last else None}
                    data = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
                    middle = len(data) // 2  # events come in any pieces
                    try:
                        self.wfile.write(data[:middle])
                        self.wfile.flush()
                        self.wfile.write(data[middle:])
                    except OSError:  # the page has stopped it
                        return
                    if not first and number == 0:
                        outer.hold.wait(PATIENCE)
                self.wfile.write(b"data: [DONE]\n\n")

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.hold.set()
    made.server.shutdown()


def serious(page: Any) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found: list[dict[str, Any]] = axe.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {node['html'][:120]} {node['failureSummary']}"
        for one in found
        for node in one["nodes"]
    ]


def idle(page: Any) -> None:
    page.wait_for_selector("#log[aria-busy=false]")


def test_a_conversation_with_the_model(browser: Any, server: Server) -> None:
    with opened(browser, server.url + "/") as page:
        assert page.text_content("h1") == "tiny"
        page.click("#open")
        page.fill("#most", "12")
        page.fill("#temperature", "0")
        page.fill("#system", "Be brief.")
        page.fill("#prompt", "Hello")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".facts")
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
        body["messages"].insert(0, {"role": "system", "content": "Be brief."})
        answer = server.post("/v1/chat/completions", **body, temperature=0).json()
        text = answer["choices"][0]["message"]["content"] or ""
        shown = page.locator(".answer .text")
        assert (shown.text_content() if shown.count() else "") == text
        assert f"{answer['usage']['completion_tokens']} tokens" in page.text_content(".facts")
        page.click("#new")
        assert page.locator(".message").count() == 0
    server.wait_for_idle()


def test_stop(browser: Any, server: Server) -> None:
    with opened(browser, server.url + "/") as page:
        page.click("#open")
        page.fill("#prompt", "def f():")
        page.press("#prompt", "Shift+Enter")
        page.keyboard.type("x")
        assert page.input_value("#prompt") == "def f():\nx"
        page.route("**/v1/chat/completions", lambda route: None)  # it never answers
        page.press("#prompt", "Enter")
        page.wait_for_selector("#stop:visible")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send:visible")
        assert "stopped" in page.text_content(".facts")


def test_a_key(browser: Any, artifact: Any) -> None:
    with serving(artifact, "--api-key", KEY) as server:
        assert server.get("/v1/models").status == 401
        with opened(browser, server.url + "/") as page:
            assert "API key" in page.text_content("#problem")
            assert page.evaluate("document.activeElement.id") == "key"
            page.keyboard.type(KEY)
            page.keyboard.press("Tab")
            until(page, "document.getElementById('model').textContent === 'tiny'")
            page.fill("#prompt", "Hello")
            page.fill("#most", "2")
            page.click("#send")
            page.wait_for_selector(".facts")
            assert page.text_content("#problem") == ""


def test_what_is_refused_can_be_sent_again(browser: Any, server: Server) -> None:
    with opened(browser, server.url + "/") as page:
        page.click("#open")
        page.fill("#temperature", "-1")
        page.fill("#prompt", "Hello")
        page.click("#send")
        until(page, "problem.textContent.includes('temperature')")
        assert page.input_value("#prompt") == "Hello"
        assert page.locator(".message").count() == 0
        page.fill("#tools", "[")
        page.click("#send")
        until(page, "problem.textContent.startsWith('Tools')")


def test_reasoning_and_calls(browser: Any, scripted: Scripted) -> None:
    with opened(browser, scripted.url) as page:
        page.click("#open")
        page.fill("#tools", '[{"type": "function", "function": {"name": "weather"}}]')
        page.fill("#prompt", "Weather?")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".call input")
        thought = page.locator("details.thought")
        assert thought.get_attribute("open") is None
        assert not page.is_visible("details.thought .text")
        thought.locator("summary").press("Enter")
        assert page.inner_text("details.thought .text") == "I need the <b>tool</b>."
        assert page.text_content(".answer > .text") == "Let me see."
        assert page.text_content(".call strong") == "weather"
        assert page.text_content(".call pre") == '{"city": "Oslo"}'
        assert page.text_content(".results") == "Send result"
        page.fill(".call input", "12 C")
        page.press(".call input", "Enter")
        assert page.locator(".results").count() == 0
        until(page, "document.body.textContent.includes('It is cold.')")
        assert page.get_attribute("#log", "aria-busy") == "true"  # it streams
        scripted.hold.set()
        idle(page)
        first, second = scripted.asked
        assert first["tools"][0]["function"]["name"] == "weather"
        user, assistant, tool = second["messages"]
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        assert user == {"role": "user", "content": "Weather?"}
        assert assistant["reasoning_content"] == "I need the <b>tool</b>."
        assert assistant["tool_calls"] == [
            {"id": "call_1", "type": "function", "function": function}
        ]
        assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "12 C"}


def test_an_answer_that_is_stopped_stays(browser: Any, scripted: Scripted) -> None:
    with opened(browser, scripted.url) as page:
        scripted.asked.append({})  # so that the answer waits after its first piece
        page.fill("#prompt", "Weather?")
        page.click("#send")
        until(page, "document.body.textContent.includes('It is cold.')")
        page.click("#stop")
        page.wait_for_selector("#send:visible")
        assert page.text_content(".answer .text") == "It is cold. "
        scripted.hold.set()
        page.fill("#prompt", "And now?")
        page.click("#send")
        until(page, "document.querySelectorAll('.facts').length === 2")
        assert [m["content"] for m in scripted.asked[-1]["messages"]] == [
            "Weather?",
            "It is cold. ",
            "And now?",
        ]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, LAPTOP], ids=["phone", "laptop"])
def test_axe_finds_nothing(browser: Any, scripted: Scripted, size: Any, theme: Any) -> None:
    with opened(browser, scripted.url, size, color_scheme=theme) as page:
        assert serious(page) == []
        page.click("#open")
        page.fill("#prompt", "Weather? " + "x" * 200)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".call input")
        page.locator("details.thought summary").click()
        page.evaluate("complain('a problem '.repeat(40))")
        assert serious(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("main.scrollWidth <= main.clientWidth")
        smallest = """() => Math.min(...[...document.querySelectorAll("button, input, select")]
          .filter(one => one.getClientRects().length).map(one => one.offsetHeight))"""
        assert page.evaluate(smallest) >= 40
        for name in ("#send", "#open", "#new"):
            box = page.locator(name).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= size["width"]


def test_everything_is_reached_by_tab(browser: Any, scripted: Scripted) -> None:
    with opened(browser, scripted.url) as page:
        assert page.evaluate("document.activeElement.id") == "prompt"
        page.click("#open")
        page.focus("#new")
        reached = []
        for _ in range(12):
            reached.append(page.evaluate("document.activeElement.id"))
            page.keyboard.press("Tab")
        wanted = ["new", "open", "main", "system", "reasoning", "temperature", "most", "tools"]
        assert reached[:10] == [*wanted, "key", "prompt"]


def test_the_page_may_load_nothing(server: Server) -> None:
    answer = server.get("/")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = answer.body.decode()
    assert "http:" not in text
    assert "https:" not in text
