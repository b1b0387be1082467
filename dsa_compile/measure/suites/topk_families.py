"""Top-k of scores of many distributions: no kernel should be fast for normal scores only."""

import zlib
from collections.abc import Iterator
from functools import partial

import torch

from dsa_compile.measure.case import Case, Plan
from dsa_compile.measure.score_families import SCORE_FAMILIES
from dsa_compile.measure.suites.topk import case, number_of_copies, padded

ROWS = (1, 16, 64, 256)
WIDTHS = (2049, 8192, 32768, 65536, 131072, 163840)


def plans() -> Iterator[Plan]:
    """Plans of all families at all shapes."""
    for width in WIDTHS:
        for rows in ROWS:
            for family in SCORE_FAMILIES:
                make = partial(family_case, rows, width, family)
                yield Plan("top-k of families", f"{rows:,}×{width:,}", make, family)


def family_case(rows: int, width: int, family: str) -> Case:
    """Rows of one family, the same in every run."""
    generator = torch.Generator("cuda")
    generator.manual_seed(zlib.crc32(f"{family} {rows} {width}".encode()))
    copies = []
    for _ in range(number_of_copies(rows, width)):
        copies.append(padded(rows, width))
        copies[-1].copy_(SCORE_FAMILIES[family](rows, width, generator, "cuda"))
    return case(copies)
