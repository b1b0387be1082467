"""Errors of a kernel and what explains them: formats, sums, and the reference's own rounding.

The truth is the op in exact arithmetic. A kernel may round as its reference does; it may also take
the operands of its products, softmax weights among them, in bf16 where the reference takes them in
fp32, add in another order, and round its result. The error that products of such operands have is
found by experiment, as in :mod:`dsa_compile.verify.comparison.rounding`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.ops.quantize import dequantize_blocks
from dsa_compile.verify.comparison.rounding import UNIT
from dsa_compile.verify.execution.exact import WIDE, numbers

RATIO = 2.0
"""Rounding error of a kernel over what explains it."""

ROW = 4.0
"""Error of the worst row over that of all rows: it may cancel where others do not."""

FUNCTIONS = 4 * UNIT[torch.float32]
"""Relative error of a GPU's exponentials, square roots and divisions."""


@dataclass(frozen=True)
class KernelError:
    """One result of a kernel.

    Attributes:
        kernel: norm of its error over the norm of the truth, on the rows that were sampled.
        healthy: what explains an error there.
        row: of all rows, the largest norm of a difference from the reference, over that row's norm
            or the rows' typical one, whichever is larger.
    """

    kernel: float
    healthy: float
    row: float

    @property
    def ratio(self) -> float:
        """Error as a multiple of the allowed one; above 1 is wrong."""
        worst = max(self.kernel / RATIO, self.row / (ROW * (RATIO + 1)))
        return worst / self.healthy if self.healthy else (math.inf if worst else 0.0)

    @property
    def problem(self) -> str:
        """Problem of a wrong result, or the empty text."""
        if self.ratio <= 1.0:
            return ""
        if max(self.kernel, self.row) == math.inf:
            return "is not finite where the reference is, or the other way round"
        if self.kernel > RATIO * self.healthy:
            return f"differs by {self.kernel:.1e}, healthy {self.healthy:.1e}"
        return f"a row differs by {self.row:.1e}, healthy {self.healthy:.1e}"


def kernel_error(
    found: Tensor,
    wanted: Tensor,
    sampled: Tensor,
    truth: Tensor | None,
    noisy: Tensor | None,
    dtype: torch.dtype,
) -> KernelError:
    """Judge one result.

    Args:
        found: fp64 ``[T, …]``, the kernel's.
        wanted: fp64 ``[T, …]``, the reference's.
        sampled: int64, the rows that ``truth`` has.
        truth: fp64, in exact arithmetic; None where the op cannot be run so.
        noisy: the same with wrong operands of products; None for an op without products.
        dtype: of the result.
    """
    stored = torch.float8_e4m3fn if dtype is torch.uint8 else dtype  # the bytes of a cache
    floor = math.hypot(UNIT.get(stored, 0.0) / 3, FUNCTIONS)
    row = _worst_row(found, wanted)
    if truth is None:
        return KernelError(_error(found, wanted), floor, row)
    parts = [_error(wanted[sampled], truth), floor]
    if noisy is not None:
        parts.append(_error(noisy, truth))
    return KernelError(_error(found[sampled], truth), math.hypot(*parts), row)


def result_numbers(results: Sequence[Tensor]) -> dict[int, Tensor]:
    """fp64 results by their number: a quantised one with its scales, which are then left out."""
    scales = {i: _scale_of(i, results) for i, r in enumerate(results) if r.dtype in _QUANTISED}
    made = {}
    for number, result in enumerate(results):
        if number in scales.values() or not result.dtype.is_floating_point:
            continue
        wide, scale = numbers(result).to(WIDE), scales.get(number)
        if scale is None:
            made[number] = wide
            continue
        factor = numbers(results[scale]).to(WIDE)
        factor = factor.unsqueeze(-1) if factor.dim() < wide.dim() else factor
        made[number] = wide * factor if factor.shape[-1] == 1 else dequantize_blocks(wide, factor)
    return made


_QUANTISED = (torch.float8_e4m3fn,)


def _scale_of(number: int, results: Sequence[Tensor]) -> int | None:
    shape = results[number].shape
    blocks = (*shape[:-1], -(-shape[-1] // 128))
    for other, result in enumerate(results):
        if result.dtype is torch.float32 and tuple(result.shape) in (blocks, tuple(shape[:-1])):
            return other
    return None


def _error(found: Tensor, truth: Tensor) -> float:
    kept = truth.isfinite() & found.isfinite()
    norm = float(torch.where(kept, truth, 0.0).norm())
    wrong = float(torch.where(kept, found - truth, 0.0).norm())
    return wrong / norm if norm else (math.inf if wrong else 0.0)


def _worst_row(found: Tensor, wanted: Tensor) -> float:
    if not wanted.numel():
        return 0.0
    kept = wanted.isfinite() & found.isfinite()
    norms = torch.where(kept, wanted, 0.0).flatten(1).norm(dim=1)
    wrong = torch.where(kept, found - wanted, 0.0).flatten(1).norm(dim=1)
    typical = norms.square().mean().sqrt().clamp(min=1e-300)
    return float((wrong / norms.clamp(min=typical)).max())
