"""``/v1/messages``: by the real client over a real model, and answers and conversations of every
kind."""

import json

import anthropic
import pytest

from dsa_compile.server.errors import ApiError
from dsa_compile.server.messages_input import conversation_of
from dsa_compile.server.openai_types import MessagesRequest
from tests.server.serving import PATIENCE, Server, events
from tests.server.test_chat_answers import CALLS, Chat

PATH = "/v1/messages"
TOOLS = [
    {
        "name": "weather",
        "description": "The weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
        "cache_control": {"type": "ephemeral"},
    }
]
USER = {"role": "user", "content": "Weather?"}
ASK = {"max_tokens": 500, "messages": [USER]}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
# as Claude Code sends it
CLAUDE_CODE = {
    "model": "tiny",
    "max_tokens": 32_000,
    "stream": True,
    "metadata": {"user_id": "user_1_account__session_2"},
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "some_beta_of_tomorrow": {"on": True},
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
            {"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Agents: none."},
    ],
}  # fmt: skip


@pytest.fixture(scope="session")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", timeout=PATIENCE, max_retries=0)


def post(chat: Chat, **body) -> bytes:
    return chat.post(path=PATH, **{**ASK, **body})


def test_a_text(claude: anthropic.Anthropic) -> None:
    options = {"model": "tiny", "system": "Be brief.", "messages": [USER], "max_tokens": 8}
    options["extra_body"] = {"ignore_eos": True, "temperature": 0}
    answer = claude.messages.create(**options)
    (block,) = answer.content
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
        "assistant", "max_tokens", None,
    )  # fmt: skip
    assert answer.usage.output_tokens == 8
    read = answer.usage.cache_read_input_tokens
    counted = claude.messages.count_tokens(model="tiny", system="Be brief.", messages=[USER])
    assert counted.input_tokens == answer.usage.input_tokens + read

    with claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == counted.input_tokens

    first = block.text[2:4]
    stopped = claude.messages.create(**options, stop_sequences=[first])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", first)
    assert stopped.content[0].text == block.text[: block.text.index(first)]


@pytest.mark.parametrize("a_step", [1, 3, 1000])
def test_thinking_text_and_calls(a_step: int) -> None:
    chat = Chat(CALLS, a_step)
    answer = json.loads(post(chat, tools=TOOLS, **THINK))
    assert answer["stop_reason"] == "tool_use"
    thought, text, *calls = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "I need the tool.")
    assert text == {"type": "text", "text": "Let me see."}
    assert [call["input"] for call in calls] == [{"city": "Oslo é"}, {"city": "Rome"}]

    found = events(post(chat, tools=TOOLS, stream=True, **THINK))
    assert (found[0]["type"], found[0]["message"]["content"]) == ("message_start", [])
    assert [each["type"] for each in found[-2:]] == ["message_delta", "message_stop"]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"] == answer["usage"]
    open_, made = None, []
    for each in found[1:-2]:  # blocks do not overlap, and their numbers rise
        if each["type"] == "content_block_start":
            assert (open_, each["index"]) == (None, len(made))
            open_ = each["index"]
            made.append((dict(each["content_block"]), [], []))
        elif each["type"] == "content_block_delta":
            assert each["index"] == open_
            made[-1][1].append(each["delta"]["type"])
            made[-1][2].append(next(v for k, v in each["delta"].items() if k != "type"))
        else:
            assert (each["type"], each["index"]) == ("content_block_stop", open_)
            open_ = None
    kinds = [block["type"] for block, _, _ in made]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert made[0][1][-1] == "signature_delta"
    assert "".join(made[0][2][:-1]) == "I need the tool."
    assert "".join(made[1][2]) == "Let me see."
    assert [json.loads("".join(texts)) for _, _, texts in made[2:]] == [
        {"city": "Oslo é"}, {"city": "Rome"},
    ]  # fmt: skip
    assert all(block["input"] == {} for block, _, _ in made[2:])


def test_an_answer_is_taken_as_input() -> None:
    chat = Chat(CALLS)
    output = json.loads(post(chat, tools=TOOLS, **THINK))["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": content, "is_error": False}
        for block, content in zip(
            (b for b in output if b["type"] == "tool_use"),
            ("12 C", [{"type": "text", "text": "20 C"}]),
            strict=True,
        )
    ]
    user = {"role": "user", "content": [{"type": "text", "text": "And?"}, *reversed(results)]}
    messages = [USER, {"role": "assistant", "content": output}, user]
    post(chat, tools=TOOLS, **THINK, messages=messages)
    shown = chat.prompt()
    assert CALLS.partition("</think>")[2].removesuffix("<｜end▁of▁sentence｜>") in shown
    assert shown.index("<result>12 C</result>") < shown.index("<result>20 C</result>")
    assert shown.index("20 C") < shown.index("<｜User｜>And?")


def test_one_call_and_half_a_call() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    answer = json.loads(post(Chat(CALLS), tools=TOOLS, tool_choice=choice, **THINK))
    assert [b["type"] for b in answer["content"]] == ["thinking", "text", "tool_use"]
    chat = Chat(CALLS)
    most = len(chat.tokenizer.encode(CALLS.partition("lo é")[0]).ids)
    answer = json.loads(post(chat, tools=TOOLS, max_tokens=most, **THINK))
    assert answer["stop_reason"] == "max_tokens"
    assert [b["type"] for b in answer["content"]] == ["thinking", "text"]


def test_what_claude_code_sends() -> None:
    chat = Chat(CALLS)
    found = events(chat.post(path=PATH, **CLAUDE_CODE))
    assert chat.headers["x-left-out"] == "some_beta_of_tomorrow, tools[1] ('web_search_20250305')"
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    usage = found[0]["message"]["usage"]
    assert usage["input_tokens"] == len(chat.engine.prompts[0])
    assert found[0]["message"]["id"].startswith("msg_")
    asked = {k: v for k, v in CLAUDE_CODE.items() if k not in ("max_tokens", "stream")}
    counted = json.loads(chat.post(path=f"{PATH}/count_tokens", **asked))
    assert counted == {"input_tokens": usage["input_tokens"]}
    assert '"name": "weather"' in chat.prompt()
    assert "billing" not in chat.prompt()


def test_more_tokens_than_fit() -> None:
    chat = Chat("ab" * 4000)
    answer = json.loads(post(chat, max_tokens=10_000))
    assert answer["stop_reason"] == "model_context_window_exceeded"
    generated = answer["usage"]["output_tokens"]
    assert generated == 2048 - len(chat.engine.prompts[0])


def test_the_prompt_of_claude_code() -> None:
    made = conversation_of(MessagesRequest.model_validate(CLAUDE_CODE))
    assert made.messages == [
        {"role": "system", "content": "You are an agent.\nBe brief."},
        {"role": "user", "content": "<system-reminder>Today.</system-reminder>\nWeather?"},
        {"role": "system", "content": "Agents: none."},
    ]


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("c s ab", "c a b s"),
        ("c s a s b u", "c a b s s u"),
        ("c a s b", "c a b s"),
        ("c ab s", "c a b s"),
        ("c s u", "c s u"),  # refused later, as without the system's
        ("u s c ab s u", "u s c a b s u"),
        ("c s", "c s"),
    ],
)
def test_results_follow_their_calls_whatever_the_system_says_between(order, wanted) -> None:
    uses = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"]
    said = {"c": {"role": "assistant", "content": uses}, "u": USER}
    messages = []
    for number, word in enumerate(order.split()):
        results = [{"type": "tool_result", "tool_use_id": name, "content": "1"} for name in word]
        system = {"role": "system", "content": f"{number}"}
        message = {"role": "user", "content": results} if word in ("a", "b", "ab") else system
        messages.append(said.get(word, message))
    made = conversation_of(MessagesRequest.model_validate({"messages": messages}))
    short = {"assistant": "c", "user": "u", "system": "s"}
    found = [each.get("tool_call_id") or short[each["role"]] for each in made.messages]
    assert " ".join(found) == wanted
    said_by_system = [int(m["content"]) for m in made.messages if m["role"] == "system"]
    assert said_by_system == sorted(said_by_system)
    if "a b" in wanted:
        counted = Chat("").post(path=f"{PATH}/count_tokens", messages=[USER, *messages])
        assert json.loads(counted)["input_tokens"] > 0  # the model's format takes them
    for place, each in enumerate(made.messages):
        if each["role"] == "system":
            assert made.fields[f"messages[{place}]"] == f"messages[{each['content']}]"


def test_what_no_text_stands_for_is_left_out_of_what_a_client_cannot_take_back() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    body = {"messages": [
        USER,
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use]},
        {"role": "user", "content": [result]},
    ]}  # fmt: skip
    made = conversation_of(MessagesRequest.model_validate(body))
    assert made.left_out == [
        "messages[1].content[0] ('redacted_thinking')",
        "messages[2].content[0].content[0] ('image')",
    ]  # fmt: skip
    assert "image" in made.messages[-1]["content"]
    assert made.messages[1]["content"] == ""


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
         "messages[0].content[0].type"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "name": 3}]}]},
         "messages[1].content[0].name"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[1].content[0]"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}, {"name": "f", "input_schema": 3}]},
         "tools[1].input_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"effort": "endless"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)  # fmt: skip
def test_refusals(server: Server, change: dict, param: str) -> None:
    answer = server.request("POST", PATH, {**ASK, **change})
    assert answer.status == 400
    found = answer.json()
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert found["error"]["message"].startswith(param), found
    assert found["request_id"] == answer.headers["request-id"]


def test_errors_as_the_client_reads_them(claude: anthropic.Anthropic) -> None:
    options = {"max_tokens": 4, "messages": [USER]}
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude-haiku", **options)
    assert missing.value.body["error"]["type"] == "not_found_error"
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(model="tiny", max_tokens=4, messages=long)


def test_a_failure_is_an_event() -> None:
    chat = Chat(CALLS)
    chat.engine.error = ApiError(500, "the engine failed", code="engine_failed")
    (only,) = events(post(chat, stream=True))
    assert only["type"] == "error"
    assert only["error"] == {"type": "api_error", "message": "the engine failed"}


def test_a_schema_and_a_forced_call(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}
    answer = claude.messages.create(
        model="tiny", max_tokens=400, messages=[USER], output_config={"format": form},
        extra_body={"temperature": 0},
    )  # fmt: skip
    assert json.loads(answer.content[0].text)["n"] in (1, 2)


@pytest.mark.parametrize("name", ["größe", "a\r\nset-cookie: b", "\u2028", "\x00", "long" * 1000])
def test_what_is_left_out_is_named_on_one_line_of_ascii(name: str) -> None:
    made = conversation_of(MessagesRequest.model_validate({"messages": [USER], name: 1}))
    said = made.headers()["x-left-out"]
    assert said.isascii()
    assert said.isprintable()
    assert 0 < len(said) <= 80
