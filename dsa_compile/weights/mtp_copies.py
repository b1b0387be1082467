"""The copies of embedding and head that checkpoints store with their MTP layer.

The layer drafts with the model's own, so that one of each is in memory; if a copy differs, the
layer would not draft as it was trained to.
"""

from collections.abc import Container, Iterator
from typing import Protocol

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.weights.windows import Window

_ROWS = 4096  # compared at a time


class Reader(Protocol):
    """Gives parameters by name, or windows of them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter."""
        ...

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype on disk."""
        ...

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        """Fill ``out`` with a window."""
        ...


def copies(spec: ModelSpec, present: Container[str]) -> dict[str, str]:
    """The copies in a checkpoint, by name, and the parameters that each should equal.

    Args:
        spec: of the model.
        present: names of what is stored.
    """
    prefix = f"model.layers.{spec.mtp_layer}."
    known = {
        f"{prefix}embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}shared_head.head.weight": "lm_head.weight",
    }
    return {copy: original for copy, original in known.items() if copy in present}


def require_equal(reader: Reader, copy: str, original: str) -> None:
    """Compare a copy with its original by value, some rows at a time; their types may differ.

    Raises:
        CheckpointError: they differ.
    """
    dtypes = {reader.stored_dtype(name) for name in (copy, original)}
    if not all(_rows_equal(reader, copy, original, _common(dtypes))):
        raise CheckpointError(
            f"{copy!r} differs from {original!r}: drafting with an embedding or a head of the MTP "
            "layer's own is not supported; compile without --draft"
        )


def _common(dtypes: set[torch.dtype]) -> torch.dtype:
    """A type that holds values of all of them exactly."""
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _rows_equal(reader: Reader, copy: str, original: str, dtype: torch.dtype) -> Iterator[bool]:
    rows, width = reader.shape(original)
    for start in range(0, rows, _ROWS):
        window = (slice(start, min(start + _ROWS, rows)), slice(0, width))
        found = [torch.empty((window[0].stop - start, width), dtype=dtype) for _ in range(2)]
        for name, out in zip((copy, original), found, strict=True):
            reader.read_into(name, out, window)
        yield torch.equal(*(part.view(torch.uint8) for part in found))
