"""Sampling parameters: how one request is sampled and when it ends, checked and frozen.

The names and meanings follow the OpenAI completion API and its usual extensions, so a server can
pass its fields straight through.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dsa_compile.common.keyword_names import changed_fields, suggests_names
from dsa_compile.errors import ParameterError, shown
from dsa_compile.runtime.requests.grammar import Grammar

# Below this a softmax is one-hot to fp32 accuracy for any logits a model makes: take the argmax.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGIT_BIAS = 100.0
MAX_OUTPUT_PENALTY = 2.0
# Names of the same options in other libraries.
OTHER_NAMES = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "do_sample": "temperature",
    "top_logprobs": "logprobs",
    "random_seed": "seed",
}
# Every generated character is compared with every stop string, between the steps of all requests.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LISTED_TOKENS = 2**20  # more than any vocabulary


@suggests_names(OTHER_NAMES)
@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping options of one request.

    A token is chosen in this order: logit bias; end tokens masked while fewer than ``min_tokens``
    were made; penalties; temperature; min-p; top-k; top-p; the draw. Ties rank the lowest token id
    first everywhere.

    Args:
        max_tokens: most tokens to generate, >= 1.
        min_tokens: tokens to generate before anything but ``max_tokens`` may end the request; end
            tokens and stop ids cannot be sampled, and stop strings do not count, until then.
        temperature: >= 0; the logits are divided by it. 0 (below 1e-5) takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the likeliest tokens whose probabilities first reach this sum, in (0, 1]; the
            probabilities are those after min-p and top-k, renormalised.
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: int64; the same seed, prompt and logits give the same tokens whatever else is in
            the batch. None draws a fresh seed.
        repetition_penalty: > 0; logits of tokens in the prompt or the output are divided by it
            where positive and multiplied where negative (Keskar et al. 2019). 1 is off.
        presence_penalty: in [-2, 2]; subtracted from tokens already in the output.
        frequency_penalty: in [-2, 2]; subtracted once for each time a token is in the output.
        logit_bias: token id -> amount in [-100, 100] added to its logit.
        logprobs: how many alternatives to report with each token (0: the chosen token alone; more
            than the vocabulary is cut to it). They are of the model's own distribution: before
            bias, penalties, temperature and filters. None reports nothing.
        prompt_logprobs: likewise for each token of the prompt but the first, given those before it.
            Its whole prompt is computed then, and nothing of it reused. None reports nothing.
        stop: a string or strings that end the text, up to 64 of up to 1,024 characters; cut from it
            unless ``include_stop_str_in_output``.
        stop_token_ids: tokens that end the request, beside the model's own end tokens.
        ignore_eos: treat the model's end tokens as ordinary ones.
        include_stop_str_in_output: keep the stop string (or the stop token's text) in the text.
        skip_special_tokens: leave special tokens out of the text; stop strings do not see them
            then. A conversation's text always has them, for its parser.
        grammar: what the text must look like, up to an end token; needs xgrammar.

    Raises:
        OptionError: a name is none of these; suggests one that is.
        ParameterError: a value has the wrong type or is outside its range; names the field.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _set(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple(self, "stop"))
        _set(self, "stop_token_ids", _tuple(self, "stop_token_ids"))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _error("logit_bias", self.logit_bias, "a mapping of token id to amount")
            # A copy: the caller's dict may change while the request runs.
            _set(self, "logit_bias", dict(self.logit_bias))
        self.validate()

    def __repr__(self) -> str:
        """The options that differ from their defaults."""
        return f"SamplingParams({', '.join(f'{n}={v!r}' for n, v in changed_fields(self))})"

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken rather than drawn."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def end_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """Tokens that end the request, given the model's own end tokens."""
        own = () if self.ignore_eos else eos_ids
        return frozenset(self.stop_token_ids).union(own)

    def validate(self) -> None:
        """Check every field; construction already does."""
        self._integer("max_tokens", 1)
        self._integer("min_tokens", 0)
        if self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        self._integer("top_k", -1, 2**31 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, open_low=True)
        self._number("presence_penalty", -MAX_OUTPUT_PENALTY, MAX_OUTPUT_PENALTY)
        self._number("frequency_penalty", -MAX_OUTPUT_PENALTY, MAX_OUTPUT_PENALTY)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _error(name, getattr(self, name), "True or False")
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            raise _error("stop", len(self.stop_strings), f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop_strings:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                want = f"a non-empty string or strings of up to {MAX_STOP_LENGTH} characters"
                raise _error("stop", self.stop, want)
        for name in ("stop_token_ids", "logit_bias"):
            if len(getattr(self, name) or ()) > MAX_LISTED_TOKENS:
                raise _error(name, len(getattr(self, name)), f"at most {MAX_LISTED_TOKENS} tokens")
        if self.grammar is not None:
            if not isinstance(self.grammar, Grammar):
                raise _error("grammar", self.grammar, "a Grammar")
            if self.ignore_eos or self.min_tokens:
                message = "sampling parameter grammar: an end token ends its text"
                raise ParameterError("grammar", f"{message}; leave out ignore_eos and min_tokens")
        for token in self.stop_token_ids:
            if not _is_int(token) or token < 0:
                raise _error("stop_token_ids", self.stop_token_ids, "token ids >= 0")
        for token, amount in (self.logit_bias or {}).items():
            if not _is_int(token) or token < 0:
                raise _error("logit_bias", token, "keyed by token ids >= 0")
            if not _is_number(amount) or not abs(amount) <= MAX_LOGIT_BIAS:
                raise _error("logit_bias", {token: amount}, "amounts in [-100, 100]")

    def _integer(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < low or (high is not None and value > high):
            bound = f">= {low}" if high is None else f"in [{low}, {high}]"
            raise _error(name, value, f"an integer {bound}")

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        inside = _is_number(value) and low <= value <= min(high, sys.float_info.max)
        if not inside or (open_low and value == low):
            if math.isinf(high):
                bound = f"finite and {'>' if open_low else '>='} {low:g}"
            else:
                bound = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
            raise _error(name, value, f"a number {bound}")


def _error(name: str, value: object, want: str) -> ParameterError:
    return ParameterError(name, f"sampling parameter {name} must be {want}; got {shown(value)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tuple(params: SamplingParams, name: str) -> tuple[object, ...]:
    value = getattr(params, name)
    if type(value) is tuple:  # such as of a copy: the checks below are slow
        return value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _error(name, value, "a sequence")
    return tuple(value)


def _set(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)
