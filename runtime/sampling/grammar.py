"""Grammars over a model's tokens, by xgrammar: which tokens may come next.

The rest of the runtime knows a :class:`GrammarState` alone: it fills a bitmask of allowed tokens
and takes the token that was chosen.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_compile.errors import ParameterError
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.runtime.sampling.schema import NotKeptError, kept

_CACHE_BYTES = 256 << 20  # of compiled grammars
_MOST_WHITESPACE = 32  # in a row within JSON, where a model could go on for ever
_BITS = 32
_SECONDS = 1.0  # of CPU time that a grammar may take whatever the number of its tokens
_SECONDS_A_TOKEN = 0.01
_REHEARSED_TOKENS = 64
_DRAWN = 4  # tokens of which the longest is taken
_REMEMBERED = 1024  # paces of grammars
_TOO_SLOW = (
    f"finding the tokens that it allows takes more than {_SECONDS_A_TOKEN * 1e3:g} ms a token; "
    "make its repetitions fewer or unambiguous"
)


class Pace:
    """CPU time that one grammar has taken, in all the requests that keep to it.

    A grammar of a few characters can take seconds for a token, and a step waits for the grammars
    of all its requests. It gets slower from token to token: little is lost until that is noticed.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0

    @property
    def too_slow(self) -> bool:
        """Whether no request may keep to the grammar any longer."""
        return self._seconds > _SECONDS + _SECONDS_A_TOKEN * self._tokens

    @contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """Count what this thread does meanwhile, for so many tokens."""
        began = time.thread_time()
        try:
            yield
        finally:
            self._seconds += time.thread_time() - began
            self._tokens += tokens


class GrammarState:
    """Position of one request in its grammar."""

    def __init__(self, matcher: Any, pace: Pace) -> None:
        self._matcher = matcher
        self._pace = pace

    def fill(self, bitmask: NDArray[np.int32], row: int) -> None:
        """Mark the tokens that may come next.

        Args:
            bitmask: int32 ``[n, ceil(V / 32)]``; token t is bit ``t % 32`` of word ``t // 32``.
            row: is written; with every token, if the text has ended, and with none, which ends the
                request, if the grammar is too slow.
        """
        if self._matcher.is_terminated():
            bitmask[row] = -1
        elif self._pace.too_slow:
            bitmask[row] = 0
        else:
            with self._pace.measured(1):
                self._matcher.fill_next_token_bitmask(bitmask, row)

    def append(self, token: int) -> None:
        """Take the token that was chosen, an allowed one."""
        if self._pace.too_slow:
            return  # the request ends with the next bitmask
        with self._pace.measured(0):
            taken = self._matcher.accept_token(token)
        assert taken, f"token {token} was not allowed"

    def fork(self) -> "GrammarState":
        """Copy of the state, to append other tokens to."""
        return GrammarState(self._matcher.fork(), self._pace)


class GrammarCompiler:
    """Compiles grammars for one vocabulary; may be used from several threads.

    Args:
        tokenizer: gives the model's ``tokenizers.Tokenizer``, or None, when it is needed first.
        vocab_size: V.
    """

    def __init__(self, tokenizer: Callable[[], Any], vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._paces: OrderedDict[Grammar, Pace] = OrderedDict()
        self._compiler: Any = None

    def compile(self, grammar: Grammar, eos_ids: Sequence[int]) -> Callable[[], GrammarState]:
        """Compile a grammar, or take it from the cache.

        Returns:
            Makes the state of one request.

        Raises:
            ParameterError: it cannot be compiled or is known to be too slow, the model has no
                tokenizer or no end token, or xgrammar is not installed.
        """
        if not eos_ids:
            raise _error("the model has no end token")
        ends = list(eos_ids)
        with self._lock:
            if self._compiler is None:
                self._compiler = _compiler(self.tokenizer(), self._vocab_size, ends)
            pace = self._pace(grammar)
        if pace.too_slow:
            raise _error(_TOO_SLOW)
        import xgrammar

        try:
            tag = {"type": "structural_tag", "format": kept(_format(grammar))}
        except (NotKeptError, RecursionError) as error:
            raise _error(_reason(error)) from None
        try:
            compiled = self._compiler.compile_structural_tag(json.dumps(tag))
        except (RuntimeError, ValueError) as error:
            raise _error(_reason(error)) from None
        return lambda: GrammarState(
            xgrammar.GrammarMatcher(compiled, override_stop_tokens=ends), pace
        )

    def rehearse(self, grammar: Grammar, eos_ids: Sequence[int]) -> None:
        """Compile a grammar and generate a text that it allows, to see what both take.

        Raises:
            ParameterError: as :meth:`compile`, or its first tokens already take too long.
        """
        begin = self.compile(grammar, eos_ids)
        bitmask = np.zeros((1, -(-self._vocab_size // _BITS)), np.int32)
        random = np.random.default_rng(0)
        state = begin()
        for _ in range(_REHEARSED_TOKENS):
            state.fill(bitmask, 0)
            allowed = allowed_by(bitmask[0], self._vocab_size)
            allowed[list(eos_ids)] = 0
            if not (tokens := np.flatnonzero(allowed)).size:
                state = begin()
                continue
            # Long ones go further, and a text is seldom ended by one.
            drawn = random.choice(tokens, _DRAWN)
            state.append(int(drawn[self._lengths[drawn].argmax()]))
        if self._pace(grammar).too_slow:
            raise _error(_TOO_SLOW)

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """Characters of each token, as the vocabulary spells it."""
        name = self.tokenizer().id_to_token
        return np.array([len(name(token) or "") for token in range(self._vocab_size)])

    def _pace(self, grammar: Grammar) -> Pace:
        """The pace of a grammar, which is remembered as long as others do not take its place."""
        pace = self._paces.setdefault(grammar, Pace())
        self._paces.move_to_end(grammar)
        if len(self._paces) > _REMEMBERED:
            self._paces.popitem(last=False)
        return pace


def bitmasks_of(
    grammars: Sequence[GrammarState | None], vocab_size: int
) -> tuple[list[int], NDArray[np.int32]]:
    """Places of the grammars that there are, and a bitmask for each, ``[m, ceil(V / 32)]``."""
    found = [place for place, grammar in enumerate(grammars) if grammar is not None]
    bitmasks = np.full((len(found), -(-vocab_size // _BITS)), -1, np.int32)
    for number, place in enumerate(found):
        grammar = grammars[place]
        assert grammar is not None
        grammar.fill(bitmasks, number)
    return found, bitmasks


def allowed_by(bitmask: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """The tokens that a bitmask of one row allows, ``[V]``."""
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    return bits[:vocab_size].astype(bool)


def _compiler(tokenizer: Any, vocab_size: int, eos_ids: list[int]) -> Any:
    if tokenizer is None:
        raise _error("the model has no tokenizer")
    try:
        import xgrammar
    except ImportError:
        raise _error("it needs xgrammar: pip install xgrammar") from None
    from transformers import PreTrainedTokenizerFast

    info = xgrammar.TokenizerInfo.from_huggingface(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer),
        vocab_size=vocab_size,
        stop_token_ids=eos_ids,
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)


def _format(grammar: Grammar) -> dict[str, Any]:
    """A grammar as a format of xgrammar's structural tags."""
    found: dict[str, Any]
    match grammar.kind:
        case "structural_tag":
            found = json.loads(grammar.text)
        case "json_schema":
            schema = json.loads(grammar.text)
            found = {"json_schema": schema, "max_whitespace_cnt": _MOST_WHITESPACE}
            found["type"] = "json_schema"
        case "regex":
            found = {"type": "regex", "pattern": grammar.text}
        case "choice":
            texts = [{"type": "const_string", "value": t} for t in json.loads(grammar.text)]
            found = {"type": "or", "elements": texts}
    if not grammar.after:
        return found
    before = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": grammar.after}
    return {"type": "sequence", "elements": [before, found]}


def _reason(error: Exception) -> str:
    """xgrammar's message, without the time and the place in its source."""
    text = " ".join(str(error).split())
    head, mark, rest = text.partition(": ")
    return (rest if mark and ".cc:" in head else text)[:300]


def _error(problem: str) -> ParameterError:
    return ParameterError("grammar", f"sampling parameter grammar: {problem}")
