"""Sampling parameters: how one request is sampled and when it ends, checked and frozen.

The names and meanings follow the OpenAI completion API and its usual extensions, so a server can
pass its fields straight through.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsa_compile.common.option_keywords import has_options
from dsa_compile.common.options import changed_fields, faults, option
from dsa_compile.errors import ParameterError, shown
from dsa_compile.facts.generation_config import CommonSampling
from dsa_compile.runtime.requests.grammar import Grammar

# Below this a softmax is one-hot to fp32 accuracy for any logits a model makes: take the argmax.
GREEDY_TEMPERATURE = 1e-5
MAX_LOGIT_BIAS = 100.0
MAX_OUTPUT_PENALTY = 2.0
# Every generated character is compared with every stop string, between the steps of all requests.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_LISTED_TOKENS = 2**20  # more than any vocabulary


@has_options
@dataclass(frozen=True)
class SamplingParams(CommonSampling):
    """Sampling and stopping options of one request.

    A token is chosen in this order: logit bias; end tokens masked while fewer than ``min_tokens``
    were made; penalties; temperature; min-p; top-k; top-p; the draw. Ties rank the lowest token id
    first everywhere.

    Raises:
        OptionError: a name is none of these; suggests one that is.
        ParameterError: a value has the wrong type or is outside its range; names the field.
    """

    presence_penalty: float = option(
        0.0, "subtracted from the logits of tokens already in the output",
        least=-MAX_OUTPUT_PENALTY, most=MAX_OUTPUT_PENALTY,
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, "subtracted once for each time a token is in the output", least=-MAX_OUTPUT_PENALTY,
        most=MAX_OUTPUT_PENALTY,
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = option(
        None, "token id -> amount in [-100, 100] added to its logit", hash=False
    )
    logprobs: int | None = option(
        None, "report each token's log-probability and those of so many of the likeliest (more "
        "than the vocabulary is cut to it), of the model's own distribution: before bias, "
        "penalties, temperature and filters", unset="report none", least=0, like=("top_logprobs",),
    )  # fmt: skip
    prompt_logprobs: int | None = option(
        None, "likewise for each token of the prompt but the first, given those before it; its "
        "whole prompt is computed then, and nothing of it reused", unset="report none", least=0,
    )  # fmt: skip
    stop: str | Sequence[str] = option(
        (), f"a string or strings that end the text, up to {MAX_STOP_STRINGS} of up to "
        f"{MAX_STOP_LENGTH:,} characters; cut from it unless include_stop_str_in_output",
        several="words", like=("stop_strings", "stop_sequences"),
    )  # fmt: skip
    stop_token_ids: Sequence[int] = option(
        (), "tokens that end the request, beside the model's own end tokens", several="words",
        metavar="ID", like=("eos_token_id",),
    )  # fmt: skip
    ignore_eos: bool = option(False, "treat the model's end tokens as ordinary ones")
    include_stop_str_in_output: bool = option(
        False, "keep the stop string (or the stop token's text) in the text"
    )
    skip_special_tokens: bool = option(
        True, "leave special tokens out of the text; stop strings do not see them then; a "
        "conversation's text always has them, for its parser",
    )  # fmt: skip
    grammar: Grammar | None = option(
        None, "what the text must look like, up to an end token; needs xgrammar"
    )

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
        for name, wanted, value in faults(self):
            raise _error(name, value, wanted)
        if self.min_tokens > self.max_tokens:
            raise _error("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
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
