"""What a caller gets back for a request."""

from dataclasses import dataclass
from typing import Literal

from dsa_compile.runtime.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's result so far.

    Args:
        request_id: the caller's name for the request.
        prompt_token_ids: the prompt's tokens.
        token_ids: every token generated, with the end token if one ended the request.
        text: the decoded tokens, or None when the engine has no tokenizer.
        finish_reason: "stop" (end token, stop id or stop string), "length" (max_tokens), "abort",
            "error", or None while the request runs.
        logprobs: one entry a generated token, or None when none were asked for.
        error: what went wrong when ``finish_reason`` is "error".
        cached_tokens: prompt tokens whose cache rows were reused rather than computed.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None = None
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether the request will get no more tokens."""
        return self.finish_reason is not None
