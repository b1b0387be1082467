"""Outputs of a request, and the check for its end."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dsa_compile.chat import Event, StreamParser
from dsa_compile.errors import RequestError
from dsa_compile.runtime.requests.answer_reader import AnswerReader
from dsa_compile.runtime.requests.detokenizer import Detokenizer, Tokenizer
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.requests.stop import StopStrings

FinishReason = Literal["stop", "length", "abort", "error"]
_Extent = tuple[int, int]  # tokens, and pieces of text
_SHOWN_IDS, _SHOWN_TEXT = 8, 60  # by repr()


class DraftCounts:
    """Drafts of a request, or of an engine, by depth, and how many were right."""

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []

    def add(self, drafted: int, accepted: int) -> None:
        """Count the drafts of one request in one step."""
        for counts, depth in ((self.drafted, drafted), (self.accepted, accepted)):
            counts += [0] * (drafted - len(counts))
            for place in range(depth):
                counts[place] += 1


@dataclass(slots=True, eq=False)
class Transcript:
    """Tokens and texts that one request has generated; they only grow, so what was read stays true.

    Args:
        prompt_token_ids: the prompt's tokens.
        pieces: of the decoded text, or None without a tokenizer.
        logprobs: one entry a generated token, or None if ``SamplingParams.logprobs`` is None.
        token_ids: every token generated.
        prompt_logprobs: one entry a prompt token but the first, as far as they are computed, or
            None if ``SamplingParams.prompt_logprobs`` is None.
        drafts: those that steps checked for it.
    """

    prompt_token_ids: list[int]
    pieces: list[str] | None = None
    logprobs: list[TokenLogprobs] | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    drafts: DraftCounts = field(default_factory=DraftCounts)
    _reported: _Extent = (0, 0)

    def output(
        self,
        request_id: str,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        cached_tokens: int = 0,
        scheduled_at: float | None = None,
    ) -> "RequestOutput":
        """Output as it is now; its new parts are those that the output before did not have."""
        before = self._reported
        self._reported = (len(self.token_ids), 0 if self.pieces is None else len(self.pieces))
        return RequestOutput(
            request_id,
            finish_reason,
            error,
            cached_tokens,
            self,
            before,
            self._reported,
            scheduled_at,
        )


@dataclass(slots=True, eq=False, repr=False)  # freezing would triple the cost of making one
class RequestOutput:
    """One request's result so far.

    Nothing is copied until it is read, so a step costs the same however long its requests are. A
    stream reads ``new_token_ids`` and ``new_text``; reading all of it at every step adds up to a
    cost that is quadratic in the length.

    Args:
        request_id: the caller's name for the request.
        finish_reason: "stop" (end token, stop id or stop string), "length" (max_tokens), "abort",
            "error", or None while the request runs.
        error: what went wrong when ``finish_reason`` is "error".
        cached_tokens: prompt tokens whose cache rows were reused rather than computed.
        scheduled_at: when the request first got cache blocks, seconds of ``time.perf_counter``;
            None before.
    """

    request_id: str
    finish_reason: FinishReason | None
    error: str | None
    cached_tokens: int
    _transcript: Transcript
    _before: _Extent
    _now: _Extent
    scheduled_at: float | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self._transcript.prompt_token_ids

    @property
    def token_ids(self) -> list[int]:
        """Tokens generated, with the end token if one ended the request."""
        return self._transcript.token_ids[: self._now[0]]

    @property
    def new_token_ids(self) -> list[int]:
        """The tokens that the output before this one did not have."""
        return self._transcript.token_ids[self._before[0] : self._now[0]]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return self._now[0]

    @property
    def drafted(self) -> tuple[int, ...]:
        """Drafts that steps checked for the request so far, by depth; empty without drafts."""
        return tuple(self._transcript.drafts.drafted)

    @property
    def accepted(self) -> tuple[int, ...]:
        """Number of :attr:`drafted` tokens that were right."""
        return tuple(self._transcript.drafts.accepted)

    @property
    def text(self) -> str | None:
        """The decoded tokens, or None when the engine has no tokenizer."""
        pieces = self._transcript.pieces
        return None if pieces is None else "".join(pieces[: self._now[1]])

    @property
    def new_text(self) -> str | None:
        """The text that the output before this one did not have.

        Never part of a stop string that is cut later, nor of a character.
        """
        pieces = self._transcript.pieces
        return None if pieces is None else "".join(pieces[self._before[1] : self._now[1]])

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One entry a generated token, or None if ``SamplingParams.logprobs`` is None."""
        logprobs = self._transcript.logprobs
        return None if logprobs is None else logprobs[: self._now[0]]

    @property
    def new_logprobs(self) -> list[TokenLogprobs]:
        """The entries that the output before this one did not have; none without log-probs."""
        return (self._transcript.logprobs or [])[self._before[0] : self._now[0]]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """One entry a prompt token but the first, which nothing comes before; None if
        ``SamplingParams.prompt_logprobs`` is None."""
        return self._transcript.prompt_logprobs

    @property
    def new_prompt_logprobs(self) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt, in the output with the first token alone."""
        return [] if self._before[0] else self.prompt_logprobs or []

    @property
    def finished(self) -> bool:
        """Whether the request will get no more tokens."""
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """Output as plain data, which ``json`` takes; for one request rather than each step."""
        described: dict[str, Any] = {
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "cached_tokens": self.cached_tokens,
            "logprobs": None if self.logprobs is None else [asdict(e) for e in self.logprobs],
        }
        if self.prompt_logprobs is not None:
            described["prompt_logprobs"] = [asdict(entry) for entry in self.prompt_logprobs]
        return described

    def to_json(self) -> str:
        """:meth:`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def __repr__(self) -> str:
        """Id, the beginning of text and tokens, and how it ended."""
        ids = ", ".join(map(str, self._transcript.token_ids[: min(self.num_tokens, _SHOWN_IDS)]))
        more = f", … {self.num_tokens} in all" if self.num_tokens > _SHOWN_IDS else ""
        parts = [repr(self.request_id)]
        if self.text is not None:
            cut = len(self.text) > _SHOWN_TEXT
            parts.append(f"text={self.text[:_SHOWN_TEXT]!r}{'…' if cut else ''}")
        parts += [f"token_ids=[{ids}{more}]", f"finish_reason={self.finish_reason!r}"]
        if self.error is not None:
            parts.append(f"error={self.error!r}")
        return f"RequestOutput({', '.join(parts)})"


class Completion:
    """Turns one request's tokens into text and decides when it ends.

    The token that ends a request counts as generated. Its text is left out of the text, as is a
    stop string, unless ``include_stop_str_in_output``.

    Args:
        params: the request's options.
        eos_ids: the model's own end tokens.
        tokenizer: makes the text; None for a model without one.
        parser: of the answer to a chat, in whose text alone stop strings are looked for; a fresh
            one. None looks for them in all of the text.

    Attributes:
        reasoning_tokens: of those generated, as far as a parser says so; tags count as none.

    Raises:
        RequestError: stop strings were given and there is no tokenizer to find them with.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None = None,
        parser: StreamParser | None = None,
    ) -> None:
        if params.stop_strings and tokenizer is None:
            raise RequestError(
                "sampling parameter stop needs a tokenizer and the model has none; "
                "use stop_token_ids"
            )
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._stop_token: int | None = None
        self._end_ids = params.end_ids(eos_ids)
        self._stop_ids = self._end_ids.difference(() if params.ignore_eos else eos_ids)
        self._count = 0
        self._detokenizer = (
            None if tokenizer is None else Detokenizer(tokenizer, params.skip_special_tokens)
        )
        stops = params.stop_strings, params.include_stop_str_in_output
        self._reader = None if parser is None else AnswerReader(parser, *stops)
        self._stops = self._reader or StopStrings(*stops)
        self.reasoning_tokens = 0
        self._pieces: list[str] = []

    @property
    def pieces(self) -> list[str] | None:
        """The text that is certain so far, as it came; grows in place. None without a tokenizer."""
        return None if self._detokenizer is None else self._pieces

    @property
    def text(self) -> str | None:
        """The text that is certain so far, all of it once finished; None without a tokenizer."""
        return None if self._detokenizer is None else "".join(self._pieces)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token that ended the request; None if it ended otherwise."""
        return self._stop_token if self._stops.found is None else self._stops.found

    def events(self) -> list[Event]:
        """What the parser has found since this was called last; nothing without one."""
        if self._reader is None:
            return []
        found, self._reader.events = self._reader.events, []
        return found

    def append(self, token_id: int) -> FinishReason | None:
        """Add a token; return why the request ends with it, or None when it goes on."""
        assert self.finish_reason is None, "the request has ended"
        reader = self._reader
        reasoned = reader is not None and reader.reasoning
        self._count += 1
        may_end = self._count > self._params.min_tokens
        ended = may_end and token_id in self._end_ids
        shown = not ended or self._params.include_stop_str_in_output
        detokenizer = self._detokenizer if shown else None
        if detokenizer is not None and self._push(detokenizer.append(token_id), may_end):
            self.finish_reason = "stop"
        else:
            if ended and token_id in self._stop_ids:
                self._stop_token = token_id
            if ended or self._count >= self._params.max_tokens:
                self.finish("stop" if ended else "length")
        if reasoned and reader is not None and reader.reasoning:
            self.reasoning_tokens += 1
        return self.finish_reason

    def finish(self, reason: FinishReason) -> None:
        """End the request and release the text held back; for ends other than its tokens' too."""
        self.finish_reason = reason
        if self._detokenizer is None:
            return
        if self._reader is not None:
            self._reader.cut = reason != "stop"
        may_end = self._count > self._params.min_tokens
        stopped = self._push(self._detokenizer.finish(), may_end)
        if not stopped and (rest := self._stops.finish()):
            self._pieces.append(rest)
        if self._stops.found is not None and reason == "length":
            self.finish_reason = "stop"

    def _push(self, text: str, may_end: bool) -> bool:
        shown, stopped = self._stops.push(text, live=may_end)
        if shown:
            self._pieces.append(shown)
        return stopped
