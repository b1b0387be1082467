"""Requests of a serving benchmark: random tokens of given lengths, or what a file holds.

A prompt of random tokens is sent as token ids: no tokenizer is needed, and lengths are exact.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from dsa_compile.errors import UserError

# Ids below are left out: of most vocabularies they are special tokens.
_FIRST_ID = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One request.

    Attributes:
        prompt: a text, or token ids.
        output_len: tokens to generate, >= 1.
    """

    prompt: str | list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class RandomTokens:
    """Prompts of random tokens.

    Args:
        rng: source of lengths and ids.
        vocab_size: ids are below; at least 32.
        prefix_len: tokens that all prompts begin with, besides their length.

    Raises:
        UserError: there are too few ids to choose from.
    """

    rng: random.Random
    vocab_size: int
    prefix_len: int = 0

    def __post_init__(self) -> None:
        if self.vocab_size < 2 * _FIRST_ID:
            raise UserError(f"--random-vocab-size must be at least {2 * _FIRST_ID}")
        if self.prefix_len < 0:
            raise UserError("--random-prefix-len must not be negative")

    def samples(
        self, count: int, input_len: int, output_len: int, range_ratio: float
    ) -> list[Sample]:
        """Requests whose lengths are uniform in ``len * (1 - ratio)`` to ``len * (1 + ratio)``.

        Raises:
            UserError: a length below 1, or a ratio that is not in [0, 1).
        """
        if min(input_len, output_len) < 1:
            raise UserError("--random-input-len and --random-output-len must be at least 1")
        if not 0 <= range_ratio < 1:
            raise UserError(f"--random-range-ratio must be in [0, 1); got {range_ratio}")
        prefix = self._ids(self.prefix_len)
        found = []
        for _ in range(count):
            tokens, new = (
                self.rng.randint(
                    max(1, math.floor(length * (1 - range_ratio))),
                    math.ceil(length * (1 + range_ratio)),
                )
                for length in (input_len, output_len)
            )
            found.append(Sample(prefix + self._ids(tokens), new))
        return found

    def of_length(self, tokens: int) -> list[int]:
        """A prompt of so many tokens and the common prefix."""
        return self._ids(self.prefix_len) + self._ids(tokens)

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(_FIRST_ID, self.vocab_size) for _ in range(count)]


def read_custom(path: Path, tokens: RandomTokens, output_len: int | None) -> Iterator[Sample]:
    """Requests of a file of JSON lines.

    A line has ``prompt``, a text or token ids, or ``input_len``, for as many random tokens; and
    ``output_tokens``, which ``output_len`` overrides.

    Raises:
        UserError: the file cannot be read, or a line is none of these.
    """
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"--dataset-path {path}: line {number}"
        entry = _json(line, where)
        if not isinstance(entry, dict):
            raise UserError(f"{where}: should be an object with prompt or input_len")
        prompt = entry.get("prompt")
        if prompt is None and _is_count(entry.get("input_len")):
            prompt = tokens.of_length(entry["input_len"])
        if not _is_prompt(prompt):
            raise UserError(f"{where}: needs prompt, a text or token ids, or input_len, a number")
        new = output_len or entry.get("output_tokens")
        if not _is_count(new):
            raise UserError(f"{where}: needs output_tokens, or give --output-len")
        yield Sample(prompt, new)


def read_sharegpt(
    path: Path, output_len: int | None, count_tokens: Callable[[str], int] | None
) -> Iterator[Sample]:
    """First turns of conversations in ShareGPT's form; answers are as long as those of the file.

    Args:
        path: a JSON list of ``{"conversations": [{"value": text}, {"value": text}, …]}``.
        output_len: tokens of every answer instead.
        count_tokens: tokens of a text; None needs ``output_len``.

    Raises:
        UserError: the file cannot be read or has no such list, or nothing tells the lengths.
    """
    if output_len is None and count_tokens is None:
        raise UserError("--dataset-name sharegpt needs --output-len, or --tokenizer to count with")
    found = _json(_text(path), f"--dataset-path {path}")
    if not isinstance(found, list):
        raise UserError(f"--dataset-path {path}: should be a list of conversations")
    for entry in found:
        turns = entry.get("conversations", ()) if isinstance(entry, dict) else ()
        texts = [turn.get("value") for turn in turns if isinstance(turn, dict)]
        match texts[:2]:
            case [str(prompt), str(answer)] if prompt and answer:
                new = output_len or (count_tokens(answer) if count_tokens is not None else 0)
                yield Sample(prompt, max(1, new))
            case _:
                continue  # some of the published ones are empty


def chosen(found: Iterator[Sample], count: int, rng: random.Random) -> list[Sample]:
    """``count`` requests in random order; of fewer, some several times.

    Raises:
        UserError: there is none.
    """
    samples = list(found)
    if not samples:
        raise UserError("the data set holds no request")
    rng.shuffle(samples)
    return [samples[n % len(samples)] for n in range(count)]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"cannot read --dataset-path {path}: {reason}") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{where}: is not JSON") from None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_prompt(value: Any) -> TypeGuard[str | list[int]]:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(token, int) and token >= 0 for token in value)
    )
