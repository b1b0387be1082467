"""Chat formats of both families."""

from dsa_compile.chat.deepseek_v32 import DeepSeekV32Format
from dsa_compile.chat.template import ChatTemplate
from dsa_compile.chat.template_format import TemplateFormat

# The wire format of GLM-5, written for these tests: no line breaks between tags, reasoning of
# earlier turns left out, and an answer opened with <think> or </think>.
GLM_TEMPLATE = """[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set last.user = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}<|user|>{{ m.content }}
{%- elif m.role == 'system' -%}<|system|>{{ m.content }}
{%- elif m.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}<|observation|>{%- endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- else -%}
<|assistant|>
{%- if m.reasoning_content and (clear_thinking is false or loop.index0 > last.user) -%}
<think>{{ m.reasoning_content.strip() }}</think>
{%- else -%}</think>{%- endif -%}
{{ m.content.strip() }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{{ call.function.name }}
{%- for k, v in call.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>
{{- v if v is string else v | tojson }}</arg_value>
{%- endfor -%}</tool_call>
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}
{%- endif -%}
"""

DEEPSEEK = DeepSeekV32Format()
GLM_5 = TemplateFormat(ChatTemplate(GLM_TEMPLATE, "test"))

_EFFORT = """[gMASK]<sop>
{%- set known = reasoning_effort is defined and reasoning_effort in LEVELS -%}
<|system|>Reasoning Effort: {{ (reasoning_effort if known else 'max') | capitalize }}"""


def glm_with_efforts(*levels: str) -> TemplateFormat:
    """A template that writes the effort as those of GLM-5.2 and 5.3 do: other names are ``max``."""
    effort = _EFFORT.replace("LEVELS", str(list(levels)))
    return TemplateFormat(ChatTemplate(GLM_TEMPLATE.replace("[gMASK]<sop>", effort), "test"))
