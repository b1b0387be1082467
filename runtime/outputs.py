"""What a caller gets back for a request, and when a request ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dsa_compile.errors import RequestError
from dsa_compile.runtime.detokenizer import Detokenizer, Tokenizer
from dsa_compile.runtime.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling_params import SamplingParams
from dsa_compile.runtime.stop import StopStrings

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


class Completion:
    """Turns one request's tokens into text and decides when it ends.

    The token that ends a request counts as generated. Its text is left out of the text, as is a
    stop string, unless ``include_stop_str_in_output``.

    Args:
        params: the request's options.
        eos_ids: the model's own end tokens.
        tokenizer: makes the text; None for a model without one.

    Raises:
        RequestError: stop strings were given and there is no tokenizer to find them with.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None = None,
    ) -> None:
        if params.stop_strings and tokenizer is None:
            raise RequestError(
                "sampling parameter stop needs a tokenizer and the model has none; "
                "use stop_token_ids"
            )
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._end_ids = params.end_ids(eos_ids)
        self._count = 0
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)
        self._text = ""
        self._taken = 0

    @property
    def text(self) -> str | None:
        """The text that is certain so far, all of it once finished; None without a tokenizer."""
        return None if self._detokenizer is None else self._text

    def append(self, token_id: int) -> FinishReason | None:
        """Add a token; return why the request ends with it, or None when it goes on."""
        assert self.finish_reason is None, "the request has ended"
        self._count += 1
        may_end = self._count > self._params.min_tokens
        ended = may_end and token_id in self._end_ids
        shown = not ended or self._params.include_stop_str_in_output
        if self._detokenizer is not None and shown:
            piece = self._detokenizer.append(token_id)
            if self._push(piece, may_end):
                self.finish_reason = "stop"
                return "stop"
        if ended or self._count >= self._params.max_tokens:
            self.finish("stop" if ended else "length")
        return self.finish_reason

    def finish(self, reason: FinishReason) -> None:
        """End the request and release the text held back; for ends other than its tokens' too."""
        self.finish_reason = reason
        if self._detokenizer is None:
            return
        may_end = self._count > self._params.min_tokens
        if self._push(self._detokenizer.finish(), may_end) and reason == "length":
            self.finish_reason = "stop"
        self._text += self._stops.finish()

    def take_new_text(self) -> str:
        """The certain text not taken before: what a stream sends next.

        Never part of a stop string that is cut later, nor of a character.
        """
        new = self._text[self._taken :]
        self._taken = len(self._text)
        return new

    def _push(self, text: str, may_end: bool) -> bool:
        shown, stopped = self._stops.push(text, live=may_end)
        self._text += shown
        return stopped
