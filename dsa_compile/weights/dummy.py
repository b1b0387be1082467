"""Random weights, made where they are used: for timing a model whose checkpoint is elsewhere.

Values are such that a forward stays finite and its work is typical: matrices keep the variance of
what they multiply, norms are near one, and the router's bias is zero, so that tokens spread over
all experts.
"""

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from dsa_compile.weights.materialize import write_expr
from dsa_compile.weights.plan import WeightEntry, loads
from dsa_compile.weights.windows import Window

# A block of weights that fills e4m3's range has its largest value at 448, some four deviations out.
_E4M3_DEVIATION = 112.0
_E4M3_MAX = 448.0
_SLAB = 1 << 26  # elements made at a time, in fp32


class DummyWeights:
    """A :class:`~dsa_compile.weights.materialize.WeightSource` of random values.

    A weight depends on its region, its key and ``seed``, and on the kind of device it is made on.
    Constants of the plan, such as RoPE's frequencies, are what they should be.

    Args:
        seed: for all of them.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        """See :class:`~dsa_compile.weights.materialize.WeightSource`."""
        if not any(loads(entry.expr)):
            write_expr(entry.expr, variables, _Nothing(), out)
            return
        generator = torch.Generator(out.device)
        generator.manual_seed(zlib.crc32(f"{stem} {key}".encode()) + self._seed)
        if key.endswith("bias"):
            out.zero_()
        elif key.endswith("norm.weight"):
            _uniform(out, 0.75, 1.25, generator)
        elif key.endswith("scale_inv"):
            unit = 1.0 / (_E4M3_DEVIATION * (128 * out.shape[-1]) ** 0.5)
            _uniform(out, 0.75 * unit, 1.25 * unit, generator)
        elif out.dtype is torch.float8_e4m3fn:
            _normal(out, _E4M3_DEVIATION, generator)
        else:
            _normal(out, out.shape[-1] ** -0.5, generator)


class _Nothing:
    """A reader for expressions that read no parameter."""

    def shape(self, name: str) -> tuple[int, ...]:
        raise AssertionError(name)

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        raise AssertionError(name)

    def read_quantized(
        self,
        name: str,
        stacked: int,
        values: Tensor | None,
        scales: Tensor | None,
        window: Window = (),
    ) -> None:
        raise AssertionError(name)


def _uniform(out: Tensor, low: float, high: float, generator: torch.Generator) -> None:
    made = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    out.copy_(made.uniform_(low, high, generator=generator))


def _normal(out: Tensor, deviation: float, generator: torch.Generator) -> None:
    flat = out.view(-1)
    slab = torch.empty(min(flat.numel(), _SLAB), dtype=torch.float32, device=out.device)
    for start in range(0, flat.numel(), _SLAB):
        part = flat[start : start + _SLAB]
        values = slab[: part.numel()].normal_(0.0, deviation, generator=generator)
        if out.dtype is torch.float8_e4m3fn:
            values.clamp_(-_E4M3_MAX, _E4M3_MAX)
        part.copy_(values)
