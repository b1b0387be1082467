"""Bodies of requests: the fields of OpenAI's API and its usual extensions.

A field that is not listed is refused by name. Ranges are checked by ``SamplingParams``, whose names
most fields share; None, or a field left out, is the model's or the server's default.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Tokens = list[Annotated[int, Field(strict=True)]]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Object = dict[str, Any]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid")
    include_usage: Flag = False
    include_obfuscation: Flag = False  # no padding is added either way


class SamplingFields(BaseModel):
    """Fields that completions and chats have in common."""

    model_config = ConfigDict(extra="forbid")

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
    logit_bias: dict[Text, Number] | None = None
    stop: Text | list[Text] | None = None
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
    guided_choice: list[Text] | None = None

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

    prompt: Text | list[Text] | Tokens | list[Tokens]
    max_tokens: Whole | None = 16
    echo: Flag = False
    logprobs: Whole | None = None
    add_special_tokens: Flag = True
    best_of: Whole | None = None
    suffix: Text | None = None
    response_format: Object | None = None
    return_token_ids: Flag = False  # vLLM's


class ChatRequest(SamplingFields):
    """``POST /v1/chat/completions``."""

    messages: list[Object]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    logprobs: Flag | None = None
    top_logprobs: Whole | None = None
    tools: list[Object] | None = None
    tool_choice: Text | Object | None = None
    parallel_tool_calls: Flag | None = None
    response_format: Object | None = None
    chat_template_kwargs: Object | None = None
    reasoning_effort: Effort | None = None
    return_token_ids: Flag = False  # vLLM's


class ResponsesRequest(SamplingFields):
    """``POST /v1/responses``."""

    input: Text | list[Object]
    instructions: Text | None = None
    max_output_tokens: Whole | None = None
    tools: list[Object] | None = None
    tool_choice: Text | Object | None = None
    parallel_tool_calls: Flag | None = None
    reasoning: Object | None = None
    text: Object | None = None
    chat_template_kwargs: Object | None = None
    include: list[Text] | None = None
    truncation: Text | None = None
    background: Flag | None = None
    previous_response_id: Text | None = None


class TokenizeRequest(BaseModel):
    """``POST /tokenize``: a text, or the conversation that a chat request would send."""

    model_config = ConfigDict(extra="forbid")
    model: Text | None = None
    prompt: Text | None = None
    add_special_tokens: Flag = True
    messages: list[Object] | None = None
    tools: list[Object] | None = None
    chat_template_kwargs: Object | None = None
    add_generation_prompt: Flag = True
    return_token_strs: Flag = False


class DetokenizeRequest(BaseModel):
    """``POST /detokenize``."""

    model_config = ConfigDict(extra="forbid")
    model: Text | None = None
    tokens: Tokens
