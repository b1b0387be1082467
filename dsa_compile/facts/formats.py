"""Formats of numbers, and recipes: the format that each group of tensors has in a compilation.

Plain data, read without torch. Passes say which formats they read or make, and a recipe runs those
that have its own; weights, kernels' rows and messages ask the format for its blocks and bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "e4m3"}


@dataclass(frozen=True)
class Format:
    """How numbers are kept: a value is what is stored, times its scale if it has one.

    Attributes:
        values: dtype of what is stored, as torch names it.
        block: values that share a scale: of a row ``(128,)``, of a matrix ``(128, 128)``. Empty
            where one scale is for the whole tensor, or where there is none.
        scales: dtype of the scales; empty where there are none.
        error: bound on the error of a value, relative to the largest of its block.
    """

    values: str
    block: tuple[int, ...] = ()
    scales: str = ""
    error: float = 0.0

    @property
    def largest(self) -> float:
        """The largest magnitude that can be stored where there are scales."""
        return {"float8_e4m3fn": 448.0}[self.values]

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of so many values, with the scales that are its own."""
        scales = -(-width // self.block[-1]) * _BYTES[self.scales] if self.block else 0
        return width * _BYTES[self.values] + scales

    def __str__(self) -> str:
        text = _SHORT[self.values]
        if self.block:
            size = "×".join(map(str, self.block))
            return f"{text} with an {_SHORT[self.scales]} scale for every {size}"
        return f"{text} under one {_SHORT[self.scales]} scale" if self.scales else text


FP32 = Format("float32", error=2.0**-24)
BF16 = Format("bfloat16", error=2.0**-8)
E4M3_MATRIX = Format("float8_e4m3fn", (128, 128), "float32", 2.0**-4)
"""Weights of DeepSeek's published checkpoints (arXiv:2412.19437, 3.3.2): ``weight_scale_inv``."""
E4M3_ROWS = Format("float8_e4m3fn", (128,), "float32", 2.0**-4)
"""Activations, and the latents of FlashMLA's rows."""
E4M3_TENSOR = Format("float8_e4m3fn", (), "float32", 2.0**-4)

Formats = Mapping[str, Format | tuple[Format, ...]]
"""By group of tensors: a field of :class:`Recipe`, and the format or formats that it may have."""


def kept_in(**groups: Format | tuple[Format, ...]) -> Formats:
    """Formats that a pass is for, by group of tensors.

    Raises:
        TypeError: a recipe has no such group.
    """
    if unknown := groups.keys() - {each.name for each in fields(Recipe)}:
        raise TypeError(f"a recipe has no {', '.join(sorted(unknown))}")
    return MappingProxyType(groups)


@dataclass(frozen=True)
class Recipe:
    """The formats of a compilation, by group of tensors.

    Attributes:
        compute: of what no pass quantises: norms, embedding, head, router, ``W_UK`` and ``W_UV``.
        weights: of projections and experts.
        activations: what these multiply.
        latent_rows: of the latent cache, without their rotated part.
        rotated_rows: the rotated part of those rows.
        index_rows: of the index cache; a row is one block.
        index_queries: a head is one block.
    """

    name: str
    compute: Format
    weights: Format
    activations: Format
    latent_rows: Format
    rotated_rows: Format
    index_rows: Format
    index_queries: Format

    def has(self, wanted: Formats) -> bool:
        """Whether every one of these groups is in a format that is wanted of it."""
        return all(
            getattr(self, group) in (kept if isinstance(kept, tuple) else (kept,))
            for group, kept in wanted.items()
        )

    def latent_bytes(self, rank: int, rope: int) -> int:
        """Bytes of a row of the latent cache."""
        return self.latent_rows.row_bytes(rank) + self.rotated_rows.row_bytes(rope)


def _plain(name: str, kept: Format) -> Recipe:
    return Recipe(name, *(kept for each in fields(Recipe) if each.name != "name"))


_QUANTISED = (BF16, E4M3_MATRIX, E4M3_ROWS)
_INDEX = (E4M3_ROWS, E4M3_ROWS)

RECIPES = {
    recipe.name: recipe
    for recipe in (
        _plain("fp32", FP32),
        _plain("bf16", BF16),
        Recipe("fp8", *_QUANTISED, E4M3_ROWS, BF16, *_INDEX),
        Recipe("fp8-kv-tensor", *_QUANTISED, E4M3_TENSOR, E4M3_TENSOR, *_INDEX),
    )
}


def recipes_with(wanted: Formats) -> tuple[str, ...]:
    """Names of the recipes that have these formats."""
    return tuple(name for name, recipe in RECIPES.items() if recipe.has(wanted))
