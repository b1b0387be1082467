"""Text files to windows of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsa_compile.errors import UserError

HELD_OUT = Path(__file__).parents[3] / "examples" / "tiny_v32" / "heldout.txt"
"""Text of an evaluation where the user names none; not part of an installed package."""


@dataclass(frozen=True)
class Window:
    """A piece of a text that fits the context.

    Attributes:
        ids: token ids, the model's begin token first if it has one.
        num_bytes: UTF-8 bytes of the tokens after the first of ``ids``, which nothing predicts.
    """

    ids: list[int]
    num_bytes: int


def read_texts(paths: Sequence[Path] = ()) -> dict[str, str]:
    """The contents of text files by path; of the held-out set of the example if none is named.

    Raises:
        UserError: a file is missing, unreadable, empty or not UTF-8 text.
    """
    if not paths and not HELD_OUT.is_file():
        raise UserError(
            "no text to evaluate on: the held-out text of examples/tiny_v32 is in the repository, "
            "not in an installed package; name UTF-8 files with --text"
        )
    return {str(path): _read(path) for path in paths or (HELD_OUT,)}


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); give text files") from None
    if "\0" in text:
        raise UserError(f"{path}: holds NUL bytes, so it is no text; give text files")
    if not text.strip():
        raise UserError(f"{path}: empty; give text to evaluate on")
    return text


def cut_windows(text: str, tokenizer: Any, context: int, lead: Sequence[int]) -> list[Window]:
    """Cut a text into consecutive windows of at most ``context`` tokens.

    Args:
        text: to cut.
        tokenizer: a ``tokenizers.Tokenizer``.
        context: tokens in a window, ``lead`` included; at least 2.
        lead: ids put first in every window, such as a begin token; may be empty.
    """
    assert context >= 2
    encoding = tokenizer.encode(text, add_special_tokens=False)
    ids, spans = encoding.ids, encoding.offsets
    step = context - len(lead)
    windows = []
    for start in range(0, len(ids), step):
        end = min(start + step, len(ids))
        scored = start if lead else start + 1
        if scored < end:
            piece = text[spans[scored][0] : spans[end - 1][1]]
            windows.append(Window([*lead, *ids[start:end]], len(piece.encode())))
    return windows


def spread(windows: Sequence[Window], tokens: int) -> list[Window]:
    """Windows at even steps from all, at least one, as many as hold about ``tokens`` tokens."""
    total = sum(len(window.ids) for window in windows)
    count = len(windows) if total <= tokens else max(1, round(len(windows) * tokens / total))
    chosen = np.linspace(0, len(windows) - 1, count).round().astype(int)
    return [windows[index] for index in dict.fromkeys(chosen.tolist())]


def random_windows(vocab_size: int, count: int, length: int, seed: int) -> list[list[int]]:
    """Uniform token ids, for what can be measured without text."""
    rng = np.random.default_rng(seed)
    ids: list[list[int]] = rng.integers(0, vocab_size, (count, length)).tolist()
    return ids
