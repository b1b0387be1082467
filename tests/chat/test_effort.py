"""Reasoning efforts: each reaches the model as one of its own levels."""

import re

import pytest

from dsa_compile.chat.effort import EFFORTS
from dsa_compile.chat.template import ChatTemplate
from dsa_compile.chat.template_format import TemplateFormat
from dsa_compile.errors import ChatError
from tests.chat.catalog import TOOLS
from tests.chat.forms import DEEPSEEK, GLM_5, GLM_TEMPLATE, glm_with_efforts

ASK = [{"role": "user", "content": "Hi"}]
ALWAYS = GLM_TEMPLATE.replace("'</think>' if enable_thinking is false else ", "")
STRICT = """{% if reasoning_effort and reasoning_effort not in ['low', 'medium', 'xhigh'] -%}
{{ raise_exception('no such effort') }}{%- endif -%}
<|system|>Effort: {{ reasoning_effort or 'xhigh' }}<|user|>{{ messages[0].content }}<think>"""
VERBATIM = "Effort: {{ reasoning_effort or 'medium' }}. {{ messages[0].content }}"
HARD = "{{ 'Think hard.' if reasoning_effort == 'high' }}{{ messages[0].content }}<think>"


def template(source: str) -> TemplateFormat:
    return TemplateFormat(ChatTemplate(source, "test"))


def shown(form: TemplateFormat, effort: str | None, **options) -> str:
    """The level that the prompt names, or "off"."""
    prompt = form.encode(ASK, effort=effort, **options)
    if prompt.endswith("</think>"):
        return "off"
    found = re.search(r"Effort: (\w+)", prompt)
    return found[1].lower() if found else "on"


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("form", "levels"),
    [
        (glm_with_efforts("high"), ["off", "off", "high", "high", "high", "max", "max"]),
        (glm_with_efforts("low", "high"), ["off", "low", "low", "high", "high", "max", "max"]),
        (template(VERBATIM), list(EFFORTS)),
        (GLM_5, ["off", "off", *["on"] * 5]),
        (DEEPSEEK, ["off", "off", *["on"] * 5]),
    ],
    ids=["as GLM-5.2", "as GLM-5.3", "verbatim", "GLM-5", "DeepSeek-V3.2"],
)
def test_every_effort_is_a_level_of_the_model(form, levels, tools) -> None:
    assert [shown(form, effort, tools=tools) for effort in EFFORTS] == levels


def test_without_an_effort_the_template_decides() -> None:
    assert shown(glm_with_efforts("low", "high"), None) == "max"


def test_a_template_that_refuses_other_names_never_sees_them() -> None:
    expected = ["low", "low", "medium", *["xhigh"] * 3]
    assert [shown(template(STRICT), effort) for effort in EFFORTS[1:]] == expected


def test_names_are_left_to_a_template_whose_default_is_no_known_level() -> None:
    prompts = {effort: template(HARD).encode(ASK, effort=effort) for effort in EFFORTS[2:]}
    assert [effort for effort, prompt in prompts.items() if "hard" in prompt] == ["high"]


@pytest.mark.parametrize("source", [ALWAYS, STRICT])
def test_no_reasoning_of_a_model_that_always_reasons_is_refused(source) -> None:
    with pytest.raises(ChatError, match="always reasons") as refused:
        template(source).encode(ASK, effort="none")
    assert refused.value.param == "reasoning_effort"
    assert template(source).encode(ASK, effort="minimal").endswith("<think>")


@pytest.mark.parametrize("form", [DEEPSEEK, GLM_5], ids=["deepseek_v32", "glm"])
def test_what_is_asked_more_exactly_comes_first(form) -> None:
    assert form.encode(ASK, effort="high", thinking=False).endswith("</think>")
    off = {"enable_thinking": False, "thinking": False}
    assert form.encode(ASK, effort="high", template_kwargs=off).endswith("</think>")


def test_a_level_by_the_templates_own_name() -> None:
    form = glm_with_efforts("low", "high")
    assert shown(form, "low", template_kwargs={"reasoning_effort": "high"}) == "high"
