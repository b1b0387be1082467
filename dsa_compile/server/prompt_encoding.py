"""Texts as token ids, at a cost that the model's context bounds and not the text.

A tokenizer takes some 140 bytes of memory for a byte of text. A text that is longer than any prompt
is refused by its first pieces, few texts are encoded at a time, and what a long one took is given
back to the system.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from dsa_compile.server.errors import ApiError

LEAST_BOUND = 1 << 17
"""Tokens that are encoded whatever the model's context, so that texts can be counted."""
_SHORT = 1024  # characters or tokens: they take less time than the way to a thread and back
_PIECE = 1 << 16  # characters
_SLACK = 256  # tokens that a cut between two pieces may add at most
_LONG = 1 << 15  # characters or tokens after which memory is given back

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="texts")
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
T = TypeVar("T")


async def in_thread(size: int, work: Callable[..., T], *given: Any) -> T:
    """Do work on texts in one of few threads, where it holds up no other request.

    Args:
        size: characters or tokens; work on a short text is done here and now.
        work: to do.
        *given: its arguments.
    """
    if size <= _SHORT:
        return work(*given)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, _trimmed, size, work, given)


def _trimmed(size: int, work: Callable[..., T], given: tuple[Any, ...]) -> T:
    try:
        return work(*given)
    finally:
        if size > _LONG and _TRIM is not None:
            _TRIM(0)


def encoder(tokenizer: Any, special: bool) -> Any:
    """What :func:`~dsa_compile.runtime.requests.prompts.token_ids_of` takes as a tokenizer.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``, or None.
        special: add the tokens that the tokenizer puts around a text.
    """
    if tokenizer is None:
        return None
    return SimpleNamespace(encode=partial(_encoding, tokenizer, special=special))


def require_text_fits(tokenizer: Any, text: str, most: int, param: str) -> None:
    """Refuse a text of far more than ``most`` tokens before all of it is encoded.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.
        text: of a request.
        most: tokens.
        param: the field that has it.

    Raises:
        ApiError: it has more (400).
    """
    if len(text) <= _PIECE:
        return
    count = 0
    for begin in range(0, len(text), _PIECE):
        try:
            piece = _encoding(tokenizer, text[begin : begin + _PIECE], special=False)
        except BaseException:  # whatever it is, encoding the whole says so
            return
        count += len(piece) - _SLACK
        require_fits(count, most, param)


def require_fits(count: int, most: int, param: str) -> None:
    """Refuse more tokens than ``most`` (400)."""
    if count > most:
        problem = f"{param} has more than {most} tokens; shorten it"
        raise ApiError(400, problem, param=param, code="context_length_exceeded")


def _encoding(tokenizer: Any, text: str, *, special: bool) -> Any:
    if len(text) <= _SHORT:
        return tokenizer.encode(text, add_special_tokens=special)
    # the same ids while other threads run, which encode does not let them
    return tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
