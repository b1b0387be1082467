"""Templates that models ship: what they see, what they may do, and how they fail."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from dsa_compile.chat import template as module
from dsa_compile.chat.template import ChatTemplate
from dsa_compile.chat.template_format import TemplateFormat
from dsa_compile.errors import ArtifactError, ChatError
from tests.chat.catalog import TOOLS, tool
from tests.chat.forms import GLM_5, GLM_TEMPLATE
from tests.chat.walks import Walker

ASK = {"role": "user", "content": "Hi"}
CALL = {
    "id": "a",
    "type": "function",
    "function": {"name": "f", "arguments": '{"s": "x<y>", "n": [1, "ü"]}'},
}
HISTORY = [
    {"role": "system", "content": "S"},
    ASK,
    {"role": "assistant", "content": None, "reasoning_content": "R", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "result"},
]


def form(source, **options):
    return TemplateFormat(ChatTemplate(source, "test"), **options)


def test_glm() -> None:
    assert GLM_5.encode(HISTORY) == (
        "[gMASK]<sop><|system|>S<|user|>Hi<|assistant|><think>R</think>"
        "<tool_call>f<arg_key>s</arg_key><arg_value>x<y></arg_value>"
        '<arg_key>n</arg_key><arg_value>[1, "ü"]</arg_value></tool_call>'
        "<|observation|><tool_response>result</tool_response><|assistant|><think>"
    )
    again = [*HISTORY, {"role": "user", "content": "More"}]
    assert "<|assistant|></think><tool_call>f" in GLM_5.encode(again)
    assert "<think>R</think><tool_call>f" in GLM_5.encode(again, drop_thinking=False)
    assert GLM_5.encode([ASK], thinking=False).endswith("<|assistant|></think>")
    assert GLM_5.encode([ASK], template_kwargs={"enable_thinking": False}).endswith("</think>")
    assert GLM_5.encode([ASK], add_generation_prompt=False).endswith("<|user|>Hi")


def test_results_take_the_order_of_the_calls() -> None:
    calls = [CALL | {"id": name} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ba"]
    prompt = GLM_5.encode([ASK, {"role": "assistant", "tool_calls": calls}, *results])
    responses = "<|observation|><tool_response>a</tool_response><tool_response>b</tool_response>"
    assert responses in prompt


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_what_transformers_renders(tools) -> None:
    call = CALL | {"function": {"name": "f", "arguments": {"s": "x<y>", "n": [1, "ü"]}}}
    plain = [*HISTORY[:2], HISTORY[2] | {"content": "", "tool_calls": [call]}, HISTORY[3]]
    [expected], _ = render_jinja_template(
        [plain], tools=tools, chat_template=GLM_TEMPLATE, add_generation_prompt=True
    )
    assert GLM_5.encode(HISTORY, tools=tools) == expected


HELPERS = (
    "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% elif i == 3 %}{% break %}{% endif %}"
    "{{ i }}{% endfor %}\n"
    "  {% generation %}said{% endgeneration %}\n"
    "{{ {'a': '<ü>', 'b': [1, none]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=1) }}"
    "{{ [1, 2] | tojson(separators=(',', ':')) }}{{ 'ü' | tojson(ensure_ascii=True) }}"
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"
    "{{ strftime_now('%%') }}{{ bos_token }}"
)


def test_helpers_are_those_of_transformers() -> None:
    [expected], _ = render_jinja_template(
        [[ASK]], chat_template=HELPERS, add_generation_prompt=True, bos_token="<b>"
    )
    assert form(HELPERS, special_tokens={"bos_token": "<b>"}).encode([ASK]) == expected


def test_a_template_refuses() -> None:
    with pytest.raises(ChatError, match="refuses them: only one message") as refused:
        form("{{ raise_exception('only one message') }}").encode([ASK])
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ absent.field }}",
        "{{ 1 // 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
    ],
)
def test_a_template_that_fails_or_breaks_out_is_an_error_of_the_request(source) -> None:
    with pytest.raises(ChatError):
        form(source).encode([ASK])


def test_output_is_limited(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_PROMPT", 1000)
    endless = "{% for i in range(9999) %}{% for j in range(9999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(ChatError, match="exceeds 1000 characters"):
        form(endless).encode([ASK])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 1500000000 }}",
        "{{ 1500000000 * ['a'] }}",
        "{% set n = 'a' * 1000 %}{{ (n * 1000) * 1000 }}",
        "{{ '%1500000000d' % 1 }}",
        "{{ 'a'.ljust(1500000000) }}",
        "{{ 'a' | center(1500000000) }}",
        "{{ 'a' | indent(width=1500000000, first=true) }}",
        "{{ 10 ** 1500000000 }}",
    ],
)
def test_no_number_asks_for_gigabytes(source) -> None:
    with pytest.raises(ChatError, match="more than 67108864 characters at once"):
        form(source).encode([ASK])


def test_numbers_of_a_usual_size() -> None:
    source = "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ '%03d' % 7 }}{{ 'x' | center(3) }}{{ 7 % 4 }}"
    assert form(source).encode([ASK]) == "ababab1024007 x 3"


def test_size_is_limited() -> None:
    with pytest.raises(ArtifactError, match="characters, more than"):
        ChatTemplate("x" * (module.MAX_TEMPLATE + 1), "model")


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% endfor %}", "{{ x | nothing }}"])
def test_what_is_no_template(source) -> None:
    with pytest.raises(ArtifactError, match=r"^model: "):
        ChatTemplate(source, "model")


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ChatError, match="surrogate"):
        form("{{ x }}").encode([ASK], template_kwargs={"x": "\ud800"})


def test_options_cannot_replace_what_the_server_sets() -> None:
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with pytest.raises(ChatError) as refused:
            form("", special_tokens={"bos_token": "<b>"}).encode([ASK], template_kwargs={name: 1})
        assert refused.value.param == f"chat_template_kwargs.{name}"


def test_a_developer_message_is_a_system_message_to_templates_that_know_none() -> None:
    roles = "{% for m in messages %}{{ m.role }} {% endfor %}"
    developer = {"role": "developer", "content": "D"}
    assert form(roles).encode([developer, ASK]) == "system user "
    knows = form(roles + "{# developer #}")
    assert knows.encode([developer, ASK]) == "developer user "


def test_messages_keep_fields_that_only_the_template_knows() -> None:
    named = form("{{ messages[0].name }}").encode([ASK | {"name": "Ann"}])
    assert named == "Ann"


def test_another_template_where_there_are_tools() -> None:
    both = form("plain", tool_template=ChatTemplate("tools", "test"))
    assert both.encode([ASK]) == "plain"
    assert both.encode([ASK], tools=[tool("f")]) == "tools"


def test_the_syntax_of_calls_is_the_templates() -> None:
    tools = [tool("f", {"a": {"type": "string"}})]
    glm = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    dsml = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" '
        'string="true">1</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    for source, text in ((GLM_TEMPLATE, glm), ("{{ '<｜DSML｜function_calls>' }}", dsml)):
        [call] = form(source).parser("<think></think>", tools).parse(text).tool_calls
        assert (call.name, json.loads(call.arguments)) == ("f", {"a": "1"})
    other = form("{{ messages[0].content }}").parser("", tools).parse(glm)
    assert (other.content, other.tool_calls) == (glm, ())


V31 = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' "
    "+ c.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
    "{% endfor %}{% endfor %}</think>"
)


def test_deepseek_v31_writes_and_reads_its_calls() -> None:
    tools = [tool("f", {"s": {"type": "string"}})]
    asked = form(V31)
    assert asked.reads_calls
    prompt = asked.encode([ASK, HISTORY[2]], tools=tools)
    written = prompt[prompt.index("<｜tool") :].removesuffix("</think>")
    [call] = asked.parser(prompt, tools).parse(written).tool_calls
    assert (call.name, call.arguments) == ("f", CALL["function"]["arguments"])
    forced = asked.forced_calls(prompt, tools)
    assert Walker().admits(forced, written.replace(', "n": [1, "ü"]', ""))
    assert not Walker().admits(forced, written)
    assert not form(V31.replace("'<｜tool▁sep｜>'", "'<｜tool▁sep｜>```json'")).reads_calls


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ c.function.arguments | tojson }}", '{"s": "x<y>", "n": [1, "ü"]}'),
        ("{{ c.function.name + c.function.arguments }}", 'f{"s": "x<y>", "n": [1, "ü"]}'),
        ("{{ c.function.arguments }}", '{"s": "x<y>", "n": [1, "ü"]}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}", "sn"),
        ("{{ raise_exception('no calls') if c.function.name == 'probe' }}{{ c.id }}", "a"),
    ],
)
def test_arguments_come_in_the_form_that_the_template_takes(source, written) -> None:
    assert form(CALLS.replace("%s", source)).encode(HISTORY) == written


def test_special_tokens_are_those_that_the_template_writes() -> None:
    assert {"<think>", "<tool_call>", "</arg_value>"} <= set(GLM_5.special_tokens)
    assert form("{{ messages[0].content }}").special_tokens == ()


def test_a_prompt_says_whether_reasoning_follows() -> None:
    thinking = form("{{ x }}")
    for end, reasoning in (("<think>", "a"), ("<think>\n", "a"), ("</think>", ""), ("", "")):
        prompt = thinking.encode([ASK], template_kwargs={"x": end})
        assert thinking.parser(prompt).parse("a</think>b").reasoning == reasoning
    assert thinking.parser("").parse("<think>a</think>b").reasoning == "a"
