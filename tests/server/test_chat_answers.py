"""Chats over the application with an engine whose answers are written down: reasoning and calls."""

import asyncio
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from dsa_compile.chat import ChatFormat
from dsa_compile.chat.deepseek_v32 import DeepSeekV32Format
from dsa_compile.chat.template import ChatTemplate
from dsa_compile.chat.template_format import TemplateFormat
from dsa_compile.runtime.requests.generation_config import GenerationConfig
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.server import artifact_text
from dsa_compile.server.admission import Admission
from dsa_compile.server.app import create_app
from dsa_compile.server.artifact_text import ArtifactText
from dsa_compile.server.errors import ApiError
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.openai_types import ChatRequest
from dsa_compile.server.protocol import Delta
from dsa_compile.server.service import Service
from dsa_compile.server.settings import Settings
from dsa_compile.server.structured import grammar_of
from dsa_compile.server.token_stream import TokenStream
from tests.chat.forms import glm_with_efforts
from tests.server.serving import events
from tests.trained import trained_model

ASK = {"role": "user", "content": "Hi"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALLS = (
    "I need the tool.</think>Let me see.\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo é</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls><｜end▁of▁sentence｜>"
)


class ScriptedEngine:
    """Answers every request with the same tokens, a few a step."""

    def __init__(self, tokens: list[int], a_step: int) -> None:
        self.limits = SchedulerConfig(64, 64, 512, 8, 2048)
        self.vocab_size = 2000
        self.eos_token_ids = (1,)
        self.prompts: list[list[int]] = []
        self.error: ApiError | None = None
        self._tokens = tokens
        self._a_step = a_step

    def add(self, request_id, prompt, params, priority=0, cache_salt=None) -> TokenStream:
        self.prompts.append(list(prompt))
        stream = TokenStream(request_id)
        asyncio.get_running_loop().create_task(self._answer(stream, params.max_tokens))
        return stream

    def abort(self, request_id: str) -> None: ...

    async def _answer(self, stream: TokenStream, most: int) -> None:
        if self.error is not None:
            stream.fail(self.error)
            return
        tokens = self._tokens[:most]
        for at in range(0, len(tokens), self._a_step):
            step = tokens[at : at + self._a_step]
            last = at + self._a_step >= len(tokens)
            reason = ("length" if tokens[-1] != 1 else "stop") if last else None
            stream.put(Delta(stream.request_id, step, reason))
            await asyncio.sleep(0)


class ScriptedSupervisor:
    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine


class Chat:
    """The application over a scripted answer."""

    def __init__(self, answer: str, a_step: int = 1, form: ChatFormat | None = None) -> None:
        self.tokenizer = Tokenizer.from_file(str(trained_model() / "tokenizer.json"))
        self.tokenizer.add_special_tokens([AddedToken("｜DSML｜", special=True)])
        tokens = self.tokenizer.encode(answer, add_special_tokens=False).ids
        self.engine = ScriptedEngine(tokens, a_step)
        text = ArtifactText("", self.tokenizer, form or DeepSeekV32Format(), GenerationConfig())
        self.service = Service(
            Settings(Path("tiny")),
            text,
            ScriptedSupervisor(self.engine),  # type: ignore[arg-type]
            Admission(8, 1000),
            Metrics("tiny"),
        )
        self._app = create_app(self.service)

    def prompt(self) -> str:
        """The prompt of the last request."""
        return self.tokenizer.decode(self.engine.prompts[-1], skip_special_tokens=False)

    def post(self, path: str = "/v1/chat/completions", **body) -> bytes:
        if path == "/v1/chat/completions":
            body = {"messages": [{"role": "user", "content": "Weather?"}], **body}
        data = json.dumps(body).encode()
        sent: list[dict] = []
        asked = False

        async def receive() -> dict:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # the client stays
            asked = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: dict) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
            "raw_path": b"/", "root_path": "", "scheme": "http", "asgi": {"version": "3.0"},
        }  # fmt: skip
        asyncio.run(self._app(scope, receive, send))
        assert sent[0]["status"] == 200, sent
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return b"".join(message["body"] for message in sent[1:])


def joined(chunks: list) -> dict:
    """The message that a stream's deltas make."""
    message: dict = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append({**call, "function": dict(call["function"])})
                else:
                    function = message["tool_calls"][call["index"]]["function"]
                    function["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("a_step", [1, 3, 1000])
def test_reasoning_and_calls(a_step: int) -> None:
    chat = Chat(CALLS, a_step)
    options = {"tools": TOOLS, "chat_template_kwargs": {"thinking": True}}
    (choice,) = json.loads(chat.post(**options))["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("I need the tool.", "Let me see.")
    arguments = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert arguments == [{"city": "Oslo é"}, {"city": "Rome"}]

    *chunks, done = events(chat.post(**options, stream=True))
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    streamed = joined(chunks)
    for name in ("reasoning_content", "content"):
        assert streamed[name] == message[name]
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in streamed["tool_calls"]]
    assert found == [
        (c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]
    ]


def test_one_call_alone() -> None:
    options = {"tools": TOOLS, "reasoning_effort": "low", "parallel_tool_calls": False}
    (choice,) = json.loads(Chat(CALLS).post(**options))["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert "Oslo" in call["function"]["arguments"]
    assert choice["finish_reason"] == "tool_calls"


def test_no_calls_without_tools() -> None:
    chat = Chat(CALLS)
    options = {"tools": TOOLS, "tool_choice": "none", "reasoning_effort": "high"}
    (choice,) = json.loads(chat.post(**options))["choices"]
    assert "tool_calls" not in choice["message"]
    assert "function_calls" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert "## Tools" not in chat.tokenizer.decode(chat.engine.prompts[0])


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<｜User｜>b")])
def test_special_tokens_that_are_no_tags(skip: bool, text: str) -> None:
    (choice,) = json.loads(Chat("a<｜User｜>b").post(skip_special_tokens=skip, max_tokens=3))[
        "choices"
    ]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "length"


def test_the_rest_of_the_context_is_the_default_length() -> None:
    chat = Chat("word " * 3000)
    answer = json.loads(chat.post())
    assert answer["usage"]["total_tokens"] == chat.engine.limits.max_model_len


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({}, "Effort: Max"),
        ({"reasoning_effort": "low"}, "Effort: High"),
        ({"reasoning_effort": "max"}, "Effort: Max"),
        ({"reasoning_effort": None}, "Effort: Max"),
        ({"reasoning_effort": "minimal"}, "</think>"),
        ({"reasoning_effort": "none"}, "</think>"),
        ({"reasoning_effort": "high", "thinking": {"type": "disabled"}}, "</think>"),
        ({"reasoning_effort": "high", "thinking": {"type": "enabled"}}, "Effort: High"),
        ({"path": "/v1/responses", "reasoning": {"effort": "medium"}}, "Effort: High"),
        ({"path": "/v1/responses", "reasoning": {"effort": "xhigh"}}, "Effort: Max"),
        ({"path": "/v1/responses", "reasoning": {"effort": "none"}}, "</think>"),
        ({"path": "/tokenize", "reasoning_effort": "high"}, "Effort: High"),
        ({"path": "/tokenize", "thinking": {"type": "disabled"}}, "</think>"),
    ],
)
def test_effort_reaches_the_prompt(options: dict, written: str) -> None:
    chat = Chat("Hi.", form=glm_with_efforts("high"))
    ask = [{"role": "user", "content": "Weather?"}]
    path = options.get("path")
    given = {"input": ask} if path == "/v1/responses" else {"messages": ask}
    answer = json.loads(chat.post(**given, **options))
    prompt = answer["prompt"] if path == "/tokenize" else chat.prompt()
    assert prompt.endswith("<think>" if "Effort" in written else "</think>")
    assert written in prompt


@pytest.mark.parametrize("clear", [True, False])
def test_reasoning_of_earlier_turns_is_kept_where_asked(clear: bool) -> None:
    chat = Chat("Hi.")
    first = {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."}
    ask = {"role": "user", "content": "Hi"}
    chat.post(messages=[ask, first, ask], thinking={"type": "enabled", "clear_thinking": clear})
    assert ("A greeting." in chat.prompt()) is not clear


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("stop", ["\n", ["a"], ["e", "I"], ["<"], ["</think>"], None])
def test_stop_strings_leave_reasoning_and_calls_alone(path: str, stop: list[str] | str) -> None:
    text = CALLS.replace("Let me see.", "")
    chat = Chat(text)
    tools = [{"type": "function", **TOOLS[0]["function"]}] if "responses" in path else TOOLS
    ask = {"input": "Weather?"} if "responses" in path else {}
    options = {**ask, "tools": tools, "chat_template_kwargs": {"thinking": True}, "stop": stop}
    answer = json.loads(chat.post(path=path, **options))
    if path == "/v1/responses":
        assert [item["type"] for item in answer["output"]] == ["reasoning", *["function_call"] * 2]
        assert answer["status"] == "completed"
        return
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "I need the tool."
    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 2


@pytest.mark.parametrize("a_step", [1, 3, 1000])
def test_a_stop_string_in_the_text_ends_the_answer(a_step: int) -> None:
    chat = Chat(CALLS, a_step)
    options = {"tools": TOOLS, "reasoning_effort": "high", "stop": [" see"]}
    answer = json.loads(chat.post(**options))
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me", "stop")
    assert "tool_calls" not in choice["message"]
    counts = answer["usage"]
    *chunks, last, _ = events(
        chat.post(**options, stream=True, stream_options={"include_usage": True})
    )
    assert joined(chunks)["content"] == "Let me"
    assert last["usage"] == counts
    assert counts == json.loads(Chat(CALLS, 1).post(**options))["usage"]  # whatever the load
    whole = len(chat.tokenizer.encode(CALLS).ids)
    reasoning = len(chat.tokenizer.encode("I need the tool.", add_special_tokens=False).ids)
    assert counts["completion_tokens_details"] == {"reasoning_tokens": reasoning}
    assert reasoning < counts["completion_tokens"] < whole
    assert choice["message"]["reasoning_content"] == "I need the tool."


def test_both_ways_of_asking_count_the_same_tokens_of_reasoning() -> None:
    for a_step in (1, 7, 1000):
        chat = Chat(CALLS, a_step)
        chats = json.loads(chat.post(tools=TOOLS, reasoning_effort="high"))["usage"]
        tools = [{"type": "function", **TOOLS[0]["function"]}]
        options = {"input": "Weather?", "tools": tools, "reasoning": {"effort": "high"}}
        responses = json.loads(chat.post(path="/v1/responses", **options))["usage"]
        reasoning = responses["output_tokens_details"]
        assert reasoning == chats["completion_tokens_details"]
        assert reasoning["reasoning_tokens"] == len(
            chat.tokenizer.encode("I need the tool.", add_special_tokens=False).ids
        )


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("a_step", [1, 5])
def test_usage_with_every_chunk(path: str, a_step: int) -> None:
    """As guidellm asks for it."""
    chat = Chat(CALLS, a_step)
    options = {"path": path, "stream": True, "ignore_eos": True, "n": 2}
    options |= {"prompt": "Weather?", "max_tokens": 50} if path == "/v1/completions" else {}
    both = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(chat.post(**options, stream_options=both))
    for index in (0, 1):
        counts = [each["usage"] for each in chunks if each["choices"][0]["index"] == index]
        generated = [count["completion_tokens"] for count in counts]
        assert generated == sorted(generated)
        assert 2 * generated[-1] == last["usage"]["completion_tokens"]
        assert generated[0] == 0 or path == "/v1/completions"
        assert {count["prompt_tokens"] for count in counts} == {last["usage"]["prompt_tokens"]}
    assert last["choices"] == []
    alone = events(chat.post(**options, stream_options={"continuous_usage_stats": True}))
    assert [chunk for chunk in alone[:-1] if not chunk["choices"]] == []
    assert all(chunk["usage"] for chunk in alone[:-1])


@pytest.mark.parametrize("required", [False, True])
def test_an_answer_that_is_cut_in_the_tags_of_a_call_has_no_tags(required: bool) -> None:
    text = CALLS.partition("</think>Let me see.")[2]
    chat = Chat(text)
    whole = chat.tokenizer.encode(text, add_special_tokens=False).ids
    head = text.partition("Oslo")[0]
    options = {"tools": TOOLS, "tool_choice": "required"} if required else {"tools": TOOLS}
    chat.engine.compile_grammar = compiled  # type: ignore[attr-defined]
    for most in range(1, len(whole)):
        (choice,) = json.loads(chat.post(**options, max_tokens=most))["choices"]
        content = choice["message"]["content"] or ""
        assert choice["finish_reason"] == "length"
        assert content.strip("" if required else "\n<") == ""
        if len(chat.tokenizer.decode(whole[:most], skip_special_tokens=False)) < len(head):
            assert not choice["message"].get("tool_calls")


async def compiled(*_: object) -> None:
    """Take any grammar."""


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_tools_whose_calls_could_not_be_read_are_refused(path: str, choice: str) -> None:
    chat = Chat("Hi.", form=TemplateFormat(ChatTemplate("{{ messages[0].content }}", "test")))
    tools = [{"type": "function", **TOOLS[0]["function"]}] if "responses" in path else TOOLS
    ask = {"input": "Hi"} if "responses" in path else {"messages": [ASK]}
    with pytest.raises(AssertionError, match="no known syntax"):
        chat.post(path=path, tools=tools, tool_choice=choice, **ask)
    chat.post(path=path, tools=tools, tool_choice="none", **ask)


@pytest.mark.slow
def test_why_there_are_no_chats(artifact: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(artifact_text, "chat_format", lambda *_: DeepSeekV32Format())
    text = artifact_text.load_artifact_text(artifact)
    assert text.chat is None
    for said in (text.no_chat, caplog.text):
        assert "does not know '｜DSML｜'" in said
    chat = Chat("Hi.")
    chat.service.text = text
    with pytest.raises(AssertionError, match=r"chat format \(deepseek_v32\)"):
        chat.post()


def test_a_schema_inside_json_object_is_kept() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    body = ChatRequest(messages=[ASK])
    inside, _ = grammar_of(body, {"type": "json_object", "schema": schema})
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert inside == grammar_of(body, form)[0] != grammar_of(body, {"type": "json_object"})[0]


def test_what_stopped_an_answer() -> None:
    chat = Chat("Hello there<｜end▁of▁sentence｜>")
    token = chat.tokenizer.encode("Hello there", add_special_tokens=False).ids[1]
    for options, reason in (
        ({}, None),
        ({"stop": ["x", "ther"]}, "ther"),
        ({"stop_token_ids": [token]}, token),
        ({"stop_token_ids": [1]}, None),  # an end token
        ({"stop_token_ids": [1], "ignore_eos": True}, 1),
    ):
        for path, more in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": "x"})):
            body = {**options, **more, "max_tokens": 100}
            (choice,) = json.loads(chat.post(path, **body))["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)
            *chunks, _ = events(chat.post(path, **body, stream=True))
            assert chunks[-1]["choices"][0]["stop_reason"] == reason
    (choice,) = json.loads(chat.post(max_tokens=1))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
