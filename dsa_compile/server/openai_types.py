"""Bodies of requests: the fields of OpenAI's API and its usual extensions.

A field that is not listed is refused by name. Ranges are checked by ``SamplingParams``, whose names
most fields share; None, or a field left out, is the model's or the server's default.
"""

from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dsa_compile.server.field_types import (
    Biases,
    Effort,
    Flag,
    Number,
    Object,
    Objects,
    Prompt,
    Stop,
    Text,
    Texts,
    Tokens,
    Whole,
)


class Body(BaseModel):
    """An object of a request. None for a field that does not take it counts as the field left out,
    as some clients write every field that they know."""

    model_config = ConfigDict(extra="forbid")
    most_unknown: ClassVar[int] = 1  # fields; the first is enough to refuse

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known, kept = cls.model_fields, _nullable(cls)
        found = {
            name: given[name]
            for name in known
            if name in given and (given[name] is not None or name in kept)
        }
        unknown = (pair for pair in given.items() if pair[0] not in known and pair[1] is not None)
        return found | dict(islice(unknown, cls.most_unknown))


@cache
def _nullable(body: type[Body]) -> frozenset[str]:
    """Fields that mean something by None."""
    fields = body.model_fields.items()
    return frozenset(name for name, field in fields if type(None) in get_args(field.annotation))


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM's: with every chunk, of its choice so far
    include_obfuscation: Flag = False  # no padding is added either way


class SamplingFields(Body):
    """Fields that completions and chats have in common."""

    model: Text | None = None
    n: Annotated[Whole, Field(ge=1)] | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    priority: Whole = 0
    cache_salt: Text | None = None
    timeout: Annotated[Number, Field(gt=0, le=1e6)] | None = None

    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    seed: Whole | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Biases | None = None
    stop: Stop | None = None
    stop_token_ids: Tokens | None = None
    min_tokens: Whole | None = None
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True

    # vLLM's; chats have response_format besides.
    prompt_logprobs: Whole | None = None
    structured_outputs: Object | None = None
    guided_json: Object | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None

    # Of no effect on the answer.
    user: Text | None = None
    metadata: Object | None = None
    store: Flag | None = None
    service_tier: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: Whole | None = 16
    echo: Flag = False
    logprobs: Whole | None = None
    add_special_tokens: Flag = True
    best_of: Whole | None = None
    suffix: Text | None = None
    response_format: Object | None = None
    return_token_ids: Flag = False  # vLLM's


class Thinking(Body):
    """DeepSeek's and Z.ai's switch for reasoning."""

    type: Literal["enabled", "disabled"]
    clear_thinking: Flag | None = None


class ChatOptions(Body):
    """Fields that say how a conversation becomes a prompt."""

    chat_template_kwargs: Object | None = None
    reasoning_effort: Effort | None = None
    thinking: Thinking | None = None

    def encoding(self) -> dict[str, Any]:
        """Options of :meth:`dsa_compile.chat.ChatFormat.encode`."""
        options: dict[str, Any] = {
            "effort": self.reasoning_effort,
            "template_kwargs": self.chat_template_kwargs,
        }
        if self.thinking is not None:
            options["thinking"] = self.thinking.type == "enabled"
            options["drop_thinking"] = self.thinking.clear_thinking
        return options


class ChatRequest(SamplingFields, ChatOptions):
    """``POST /v1/chat/completions``."""

    messages: Objects
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: Flag | None = None
    top_logprobs: Whole | None = None
    tools: Objects | None = None
    tool_choice: Text | Object | None = None
    parallel_tool_calls: Flag | None = None
    response_format: Object | None = None
    modalities: list[Literal["text"]] | None = None
    return_token_ids: Flag = False  # vLLM's


class ResponsesRequest(SamplingFields):
    """``POST /v1/responses``."""

    input: Text | Objects
    instructions: Text | None = None
    max_output_tokens: Whole | None = None
    tools: Objects | None = None
    tool_choice: Text | Object | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: Object | None = None
    text: Object | None = None
    chat_template_kwargs: Object | None = None
    include: Texts | None = None
    truncation: Text | None = None
    background: Flag | None = None
    previous_response_id: Text | None = None
    client_metadata: Object | None = None  # Codex's, of no effect


class OutputConfig(Body):
    """Anthropic's options of an answer."""

    effort: Effort | None = None
    format: Object | None = None


class MessagesRequest(SamplingFields):
    """``POST /v1/messages/count_tokens``. A field that is not listed is left out, and said so: the
    clients of this API send new ones with every version."""

    model_config = ConfigDict(extra="allow")
    most_unknown: ClassVar[int] = 16

    messages: Objects
    system: Text | Objects | None = None
    tools: Objects | None = None
    tool_choice: Object | None = None
    thinking: Object | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Texts | None = None

    # Of no effect on the answer.
    cache_control: Object | None = None
    context_management: Object | None = None
    diagnostics: Object | None = None

    def encoding(self) -> dict[str, Any]:
        """Options of :meth:`dsa_compile.chat.ChatFormat.encode`."""
        effort = None if self.output_config is None else self.output_config.effort
        thinking = None if self.thinking is None else self.thinking.get("type") != "disabled"
        return {"thinking": thinking, "effort": effort}

    def response_format(self) -> dict[str, Any] | None:
        """``output_config.format`` in the form of the ``response_format`` of chats."""
        given = None if self.output_config is None else self.output_config.format
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": given}


class AnsweredMessagesRequest(MessagesRequest):
    """``POST /v1/messages``."""

    max_tokens: Whole


class TokenizeRequest(ChatOptions):
    """``POST /tokenize``: a text, or the conversation that a chat request would send."""

    model: Text | None = None
    prompt: Text | None = None
    add_special_tokens: Flag = True
    messages: Objects | None = None
    tools: Objects | None = None
    add_generation_prompt: Flag = True
    return_token_strs: Flag = False


class DetokenizeRequest(Body):
    """``POST /detokenize``."""

    model: Text | None = None
    tokens: Tokens
