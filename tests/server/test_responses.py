"""``/v1/responses``: by the real client over a real model, and answers of every kind."""

import json

import openai
import pytest

from dsa_compile.server.errors import ApiError
from dsa_compile.server.response_input import conversation_of
from tests.server.serving import Server, events
from tests.server.test_chat_answers import CALLS, Chat

PATH = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
]
ASK = {"input": "Weather?"}


def post(chat: Chat, **body) -> bytes:
    return chat.post(path=PATH, **{**ASK, **body})


def test_a_text(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 8}
    options["extra_body"] = {"ignore_eos": True}
    answer = client.responses.create(**options, instructions="Be brief.")
    (message,) = answer.output
    assert answer.output_text == message.content[0].text
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert message.status == "incomplete"
    assert answer.usage.output_tokens == 8
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.usage.total_tokens == answer.usage.input_tokens + 8

    found = list(client.responses.create(**options, instructions="Be brief.", stream=True))
    assert [each.sequence_number for each in found] == list(range(len(found)))
    kinds = [each.type.removeprefix("response.") for each in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds[-4:] == ends
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(each.delta for each in found if each.type == "response.output_text.delta")
    assert text == found[-4].text == found[-1].response.output_text == answer.output_text
    assert found[-1].response.usage == answer.usage.model_copy(
        update={"input_tokens_details": found[-1].response.usage.input_tokens_details}
    )


def test_the_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "input": [{"role": "user", "content": "Hello"}]}
    with client.responses.stream(**options, temperature=0, max_output_tokens=5) as stream:
        text = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text


def test_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    form = {
        "type": "json_schema",
        "name": "it",
        "schema": {**schema, "additionalProperties": False},
    }
    answer = client.responses.create(
        model="tiny", input="Hello", max_output_tokens=400, temperature=0, text={"format": form}
    )
    assert answer.status == "completed"
    assert json.loads(answer.output_text)["n"] in (1, 2)


@pytest.mark.parametrize("a_step", [1, 3, 1000])
def test_reasoning_text_and_calls(a_step: int) -> None:
    chat = Chat(CALLS, a_step)
    options = {"tools": TOOLS, "reasoning": {"effort": "high", "summary": "auto"}}
    answer = json.loads(post(chat, **options))
    assert answer["status"] == "completed"
    reasoning, message, *calls = answer["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I need the tool."}]
    assert message["content"][0]["text"] == "Let me see."
    assert [json.loads(call["arguments"])["city"] for call in calls] == ["Oslo é", "Rome"]
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert len({call["call_id"] for call in calls}) == 2
    counts = answer["usage"]
    tokens = counts["output_tokens_details"]["reasoning_tokens"]
    assert 0 < tokens < counts["output_tokens"]

    found = events(post(chat, **options, stream=True))
    streamed = found[-1]["response"]["output"]
    for one, other in zip(streamed, answer["output"], strict=True):
        names = one.keys() - {"id", "call_id"}
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
    for number, item in enumerate(streamed):
        of_item = [each for each in found if each.get("output_index") == number]
        first, *_, last = of_item
        assert (first["type"], last["type"]) == (
            "response.output_item.added",
            "response.output_item.done",
        )
        assert first["item"]["status"] == "in_progress"
        assert last["item"] == item
        grown = "".join(each["delta"] for each in of_item if each["type"].endswith(".delta"))
        whole = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert grown == whole
        (done,) = [each for each in of_item if each["type"].endswith(("text.done", "ments.done"))]
        assert done.get("text", done.get("arguments")) == whole


def test_one_call_alone() -> None:
    options = {"tools": TOOLS, "reasoning": {"effort": "low"}, "parallel_tool_calls": False}
    *_, call = json.loads(post(Chat(CALLS), **options))["output"]
    assert "Oslo" in call["arguments"]


def test_a_call_that_is_cut_off() -> None:
    chat = Chat(CALLS)
    many = len(chat.tokenizer.encode(CALLS.partition("Oslo")[0]).ids)
    options = {"tools": TOOLS, "reasoning": {"effort": "low"}, "max_output_tokens": many}
    answer = json.loads(post(chat, **options))
    assert answer["status"] == "incomplete"
    assert [item["status"] for item in answer["output"]] == ["completed", "completed", "incomplete"]


def test_a_conversation_becomes_messages() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    text = [{"type": "output_text", "text": "Let me "}, {"type": "output_text", "text": "see."}]
    parts = [{"type": "input_text", "text": "x"}]
    given = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": text},
        call,
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "12 C"},
        {"type": "function_call_output", "call_id": "b", "output": parts},
        {"role": "assistant", "content": "Cold."},
        {"role": "assistant", "content": "Very."},
        {"role": "user", "content": "Thanks"},
    ]  # fmt: skip
    function = {"name": "weather", "arguments": "{}"}
    made = conversation_of(given, "Short.")
    places = ["instructions", *(f"input[{n}]" for n in (0, 1, 2, 6, 7, 8, 9, 10))]
    assert [made.fields[f"messages[{n}]"] for n in range(9)] == places
    assert made.messages == [
        {"role": "system", "content": "Short."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "Let me see.",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in "ab"],
        },
        {"role": "tool", "tool_call_id": "a", "content": "12 C"},
        {"role": "tool", "tool_call_id": "b", "content": "x"},
        {"role": "assistant", "content": "Cold."},
        {"role": "assistant", "content": "Very."},
        {"role": "user", "content": "Thanks"},
    ]


def test_an_answer_is_taken_as_input() -> None:
    """As clients do that keep the conversation: the output behind the input, and the results."""
    chat = Chat(CALLS)
    options = {"tools": TOOLS, "reasoning": {"effort": "high"}}
    output = json.loads(post(chat, **options))["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "12 C"}
        for item in output
        if item["type"] == "function_call"
    ]
    post(chat, **options, input=[{"role": "user", "content": "Weather?"}, *output, *results])
    shown = chat.prompt()
    assert CALLS.removesuffix("<｜end▁of▁sentence｜>") in shown
    assert shown.count("<result>12 C</result>") == 2


def test_an_answer_that_was_cut_off_is_taken_as_input() -> None:
    chat = Chat(CALLS)
    many = len(chat.tokenizer.encode(CALLS.partition("lo é")[0]).ids)
    options = {"tools": TOOLS, "reasoning": {"effort": "low"}}
    output = json.loads(post(chat, **options, max_output_tokens=many))["output"]
    city = output[-1]["arguments"].removeprefix('{"city": "')
    assert city
    assert "Oslo é".startswith(city)
    result = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "no"}
    post(chat, **options, input=[{"role": "user", "content": "Weather?"}, *output, result])
    assert f' string="true">{city}</' in chat.prompt()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
        ({"reasoning": {"budget": 3}}, "reasoning.budget"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"tone": "kind"}}, "text.tone"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "f"}, {"type": "function"}]}, "tools[1].name"),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "function_call"}],
             "instructions": "Be brief."}, "input[1].name",
        ),
        (
            {"input": [{"role": "user", "content": "x"}, {"type": "reasoning", "content": []},
                       {"role": "assistant", "content": "y"},
                       {"type": "function_call", "name": "f", "arguments": [1]}]},
            "input[3].arguments",
        ),
        (
            {"input": [{"role": "user", "content": "x"},
                       {"type": "function_call", "name": "f", "call_id": "a"},
                       {"type": "function_call_output", "call_id": "b", "output": "y"}]},
            "input[2].call_id",
        ),
        ({"input": [{"type": "function_call_output", "output": 3}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "input[0].content"),
        ({"input": [{"role": "messages[99]", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
        ({"conversation": "x"}, "conversation"),
    ],
)  # fmt: skip
def test_refusals(server: Server, change: dict, param: str) -> None:
    answer = server.request("POST", PATH, {**ASK, **change})
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert not error["message"].startswith(("messages", "tool_calls"))
    assert error["message"].startswith(param) or error["code"] == "context_length_exceeded"


def test_a_failure_is_an_event() -> None:
    class Failing(Chat):
        def __init__(self) -> None:
            super().__init__(CALLS)
            self.engine.error = ApiError(500, "the engine failed", code="engine_failed")

    *_, last = events(post(Failing(), stream=True))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "engine_failed", "message": "the engine failed"}


# as Codex sends it where nothing is configured
CODEX = {
    "model": "tiny",
    "instructions": "You are Codex.",
    "input": [
        {"type": "additional_tools", "role": "developer", "tools": []},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ok"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "local_shell_call", "call_id": "l", "status": "completed", "action": {}},
        {"type": "web_search_call", "status": "completed", "action": {"type": "other"}},
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
        {"type": "function_call", "call_id": "v", "name": "view_image", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "v",
         "output": [{"type": "input_image", "image_url": "data:,"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "More"}]},
    ],
    "tools": [
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
        {**TOOLS[0], "strict": False},
        {"type": "web_search", "external_web_access": True},
        {"type": "namespace", "name": "multi_agent_v1", "tools": []},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0197",
    "client_metadata": {"x-codex-installation-id": "1"},
    "text": {"verbosity": "low"},
}  # fmt: skip


def test_what_codex_sends() -> None:
    chat = Chat(CALLS)
    found = events(chat.post(path=PATH, **CODEX))
    assert found[-1]["type"] == "response.completed"
    calls = [i for i in found[-1]["response"]["output"] if i["type"] == "function_call"]
    assert [call["name"] for call in calls] == ["weather", "weather"]
    left = chat.headers["x-left-out"].split(", ")
    assert [each.partition(" ")[0] for each in left] == [
        "input[0]", "input[4]", "input[5]", "input[9].output[0]",
        "tools[0]", "tools[2]", "tools[3]", "tools[4]", "text.verbosity",
    ]  # fmt: skip
    shown = chat.prompt()
    assert 'name="input" string="true">*** Begin<' in shown
    assert "<result>Done</result>" in shown
    assert "[input_image left out" in shown
    assert "web_search" not in shown


def test_a_kind_of_tool_may_have_any_name() -> None:
    chat = Chat(CALLS)
    chat.post(path=PATH, **ASK, tools=[{"type": "é\n" * 99}, *[{"type": "x"}] * 99])
    said = chat.headers["x-left-out"]
    assert said.isascii()
    assert "\n" not in said
    assert said.endswith("68 more")
