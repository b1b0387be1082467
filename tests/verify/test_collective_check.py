"""Collectives are run rank by rank, and give each rank what all operands make."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.facts.layout import DP, TP
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ops import COMBINE, REFERENCE
from dsa_compile.ops.collectives import all_reduce, communicator_of
from dsa_compile.ops.quantize import add_rms_norm_quantize
from dsa_compile.verify.checks import collective_check
from dsa_compile.verify.checks.collective_check import collective_reports
from tests.passes.sketch import region, value, weight

dsa = torch.ops.dsa
E4M3 = torch.float8_e4m3fn


@region(
    "moe",
    value("x", "T", 256, dtype=torch.bfloat16),
    value("q", "T", 256, dtype=E4M3),
    value("i", "T", 3, dtype=torch.int64),
    value("residual", "T", 256, dtype=torch.bfloat16),
    weight("norm", 256, dtype=torch.bfloat16),
)
def every_collective(x, q, i, residual, norm):
    columns = dsa.all_gather.default(x, TP, 4)
    total = dsa.all_reduce.default(x, TP, 4)
    fused = dsa.all_reduce_add_rms_norm_quantize.default(total, TP, 4, residual, norm, 1e-6, False)
    rows = dsa.all_gather_many.default([x, q, i], DP, 2)
    own = dsa.reduce_scatter.default(rows[0], DP, 2)
    return columns, fused[0], rows[0], own


@pytest.fixture
def program() -> Any:
    return SimpleNamespace(regions={"moe": every_collective.trace(FakeWorld())})


def test_every_collective_is_right(program: Any) -> None:
    reports = collective_reports(program)
    assert {report.op for report in reports} == set(map(str, COMBINE))
    assert [report.problem for report in reports if report.problem] == []


def columns_as_they_lie(x: Tensor, axis: str, ranks: int) -> Tensor:
    if ranks == 1:
        return x.clone()
    return communicator_of(axis, ranks).gather(x, axis, ranks).reshape(*x.shape[:-1], -1)


def rows_by_turns(xs: Sequence[Tensor], axis: str, ranks: int) -> list[Tensor]:
    if ranks == 1:
        return [x.clone() for x in xs]
    every = communicator_of(axis, ranks).gather_many(xs, axis, ranks)
    return [part.transpose(0, 1).flatten(0, 1) for part in every]


def stream_of_one_rank(x, axis, ranks, residual, *rest: Any) -> Any:
    found = add_rms_norm_quantize(all_reduce(x, axis, ranks), residual, *rest)
    return (*found[:3], residual + x)


def stream_summed(x, axis, ranks, residual, *rest: Any) -> Any:
    total = all_reduce(x + residual, axis, ranks)
    return add_rms_norm_quantize(total, torch.zeros_like(x), *rest)


def sum_of_nobody(x: Tensor, axis: str, ranks: int) -> Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("op", "wrong", "said"),
    [
        ("all_gather", columns_as_they_lie, "gives rank 0 of 4 (tp) not what all operands make"),
        ("all_gather_many", rows_by_turns, "gives rank 0 of 2 (dp)"),
        ("all_reduce_add_rms_norm_quantize", stream_of_one_rank, "gives rank 0 of 4 (tp)"),
        ("all_reduce_add_rms_norm_quantize", stream_summed, "gives rank 0 of 4 (tp)"),
        ("all_reduce", sum_of_nobody, "meets no other rank"),
    ],
)
def test_a_wrong_one_is_named(
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    wrong: Callable[..., Any],
    said: str,
) -> None:
    target = getattr(dsa, op).default
    monkeypatch.setattr(collective_check, "REFERENCE", {**REFERENCE, target: wrong})
    (report,) = (report for report in collective_reports(program) if report.problem)
    assert report.op == str(target)
    assert said in report.problem
