"""Run one Triton kernel under Triton's interpreter beside its op's reference.

    TRITON_INTERPRET=1 python -m tests.planted_bugs.second.kernels_interpreted OP

Prints the largest error over inputs whose rows lie apart, whose widths are no powers of two, and
whose requests end anywhere.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch

from dsa_compile.kernels.registry import load
from dsa_compile.ops import REFERENCE
from tests.kernels.interpreter import round_as_hardware


def samples(op: str) -> Iterator[tuple[Any, ...]]:
    """Arguments of an op."""
    torch.manual_seed(5)
    wide = torch.randn(6, 512)
    match op:
        case "rms_norm":
            yield wide[:, :96], torch.rand(96), 1e-6
        case "layer_norm":
            yield wide[:, :96], torch.rand(96), torch.rand(96), 1e-6
        case "quantize_blocks":
            yield wide[:, :256], False
            yield wide[:, 128:384].bfloat16(), True
        case "rope_half":
            angles = torch.rand(6, 8)
            table = torch.cat((angles, angles), -1)
            yield wide[:, :64].reshape(6, 4, 16), table.cos(), table.sin()
        case "dense_slots":
            tables = torch.tensor([[3, 1], [0, -1], [2, -1]], dtype=torch.int32)
            ends = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
            lengths = torch.tensor([7, 1, 2], dtype=torch.int32)
            yield tables, ends, lengths, torch.arange(7), 4, 8
        case "write_index_cache":
            yield wide[:, :32], torch.zeros(3, 4, 32), torch.tensor([0, 5, -1, 11, 4, 2])
        case _:
            raise ValueError(f"no sample of {op}")


def main(op: str) -> None:
    """Print the error."""
    round_as_hardware()
    kernel = load(op, "triton", "sm_90a")
    assert kernel is not None
    reference = REFERENCE[getattr(torch.ops.dsa, op).default]
    worst = 0.0
    for args in samples(op):
        results = []
        for function in (reference, kernel):
            given = [
                a.clone() if isinstance(a, torch.Tensor) and "cache" in op else a for a in args
            ]
            made = function(*given)
            made = given if made is None else made
            results.append([t for t in (made if isinstance(made, list | tuple) else [made])
                            if isinstance(t, torch.Tensor)])  # fmt: skip
        for wanted, got in zip(*results, strict=True):
            error = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max()
            worst = max(worst, float(error))
    print(worst)


if __name__ == "__main__":
    main(*sys.argv[1:])
