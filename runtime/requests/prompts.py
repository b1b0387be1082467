"""Prompts as callers give them and what comes with them, checked; prompts as token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsa_compile.errors import ArtifactError, RequestError, shown
from dsa_compile.runtime.requests.chat_prompt import ChatPrompt

LONGEST_NAME = 512
"""Characters of a request's id and of its cache salt; the id is repeated in errors and outputs."""


class TokenArray(Protocol):
    """An array or a tensor of token ids."""

    def tolist(self) -> Any:
        """Elements of the sequence."""
        ...


Prompt = str | Sequence[int] | ChatPrompt | Mapping[str, Any] | TokenArray
"""A text; token ids as a list, an array or a tensor, of one dimension or of one row; a conversation
of :meth:`Engine.chat_prompt`; or what a tokenizer of ``transformers`` returns for one text or
conversation: a mapping whose ``input_ids`` are token ids."""


class TokenizerFiles(Protocol):
    """The part of an artifact that holds its tokenizer; ``Artifact`` has it."""

    @property
    def path(self) -> Path:
        """The artifact's directory."""
        ...

    def tokenizer_bytes(self, name: str) -> bytes | None:
        """A file of the tokenizer, checked; None if there is none of that name."""
        ...


def token_ids_of(request_id: str, prompt: Prompt, vocab_size: int, tokenizer: Any) -> list[int]:
    """The prompt's token ids; at least one, each in ``[0, vocab_size)``.

    Args:
        request_id: named in errors.
        prompt: see :data:`Prompt`.
        vocab_size: of the model.
        tokenizer: has ``encode(text).ids``; None if texts cannot be taken.

    Raises:
        RequestError: it is empty, of another type, text without a tokenizer or that the tokenizer
            cannot encode, or holds an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                f"request {request_id!r}: text needs a tokenizer and this engine has none; "
                f"give token ids"
            )
        try:
            prompt = tokenizer.encode(prompt).ids
        except BaseException as error:
            raise RequestError(
                f"request {request_id!r}: the tokenizer cannot encode the text ({_reason(error)})"
            ) from None
    try:
        given = _ids_in(prompt)
        ids = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):  # ragged, or a tensor that numpy cannot take
        ids = np.asarray(None)
    if ids.shape == (0,):
        raise RequestError(f"request {request_id!r}: the prompt is empty; give at least one token")
    if ids.ndim == 1 and ids.dtype.kind in "Of" and all(type(i) is int for i in given):
        ids = np.array(given, object)  # beyond 64 bits, where numpy has no integers
    elif ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError(
            f"request {request_id!r}: a prompt is a text or a list of integer token ids"
        )
    for token in (int(ids.min()), int(ids.max())):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"request {request_id!r}: token id {token} is out of range; the model's ids are "
                f"0 to {vocab_size - 1}"
            )
    token_ids: list[int] = ids.tolist()
    return token_ids


def _ids_in(prompt: Any) -> Any:
    """The token ids inside what holds them; the row, if that is a batch of one."""
    if isinstance(prompt, ChatPrompt):
        return prompt.token_ids
    if isinstance(prompt, list | tuple):
        return prompt
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt = prompt["input_ids"]
    if hasattr(prompt, "detach"):  # a tensor, on whatever device
        prompt = prompt.detach().cpu()
    return prompt[0] if np.ndim(prompt) == 2 and len(prompt) == 1 else prompt


def load_tokenizer(artifact: TokenizerFiles) -> Any:
    """The artifact's tokenizer, or None if it has none or ``tokenizers`` is not installed.

    Truncation and padding saved with it are left out: they are settings of whoever trained it, and
    would cut prompts or fill them up. Its special tokens are added, see
    :mod:`~dsa_compile.runtime.requests.special_tokens`.

    Raises:
        ArtifactError: its file is not the one compiled, or not one that ``tokenizers`` reads and
            encodes with.
    """
    data = artifact.tokenizer_bytes("tokenizer.json")
    if data is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")  # a broken template fails with any text
    except BaseException as error:
        file = artifact.path / "tokenizer" / "tokenizer.json"
        raise ArtifactError(
            f"{file}: not a tokenizer ({_reason(error)}); mend the model's tokenizer.json and "
            "recompile"
        ) from None
    return tokenizer


def _reason(error: BaseException) -> str:
    """One line on a failure of ``tokenizers``; it raises Exception itself, and panics, which are
    no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return " ".join(str(error).split())[:200]


def require_request_id(request_id: object) -> None:
    """Check the name of a request.

    Raises:
        RequestError: not a string, too long, or not UTF-8.
    """
    _require_name("request id", request_id)


def require_options(request_id: str, priority: object, cache_salt: object) -> None:
    """Check the options of a request.

    Raises:
        RequestError: the priority is not an integer, or the salt neither a string nor None.
    """
    if type(priority) is not int:
        raise RequestError(f"request {request_id!r}: priority {shown(priority)} must be an integer")
    if cache_salt is not None:
        _require_name(f"request {request_id!r}: cache_salt", cache_salt)


def _require_name(what: str, name: object) -> None:
    if not isinstance(name, str):
        raise RequestError(f"{what} {shown(name)} must be a string")
    if len(name) > LONGEST_NAME:
        raise RequestError(f"{what} {shown(name)} has more than {LONGEST_NAME} characters")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # a byte of a command line or half a character of a JSON body
        raise RequestError(f"{what} {shown(name)} is not text that UTF-8 can write") from None
