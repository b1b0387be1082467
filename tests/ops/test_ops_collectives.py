"""Operands that travel together: lists, of which no signature says what they are."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dsa_compile.ops.collectives import communicating

dsa = torch.ops.dsa


class Twice:
    """Two ranks that have the same."""

    def gather_many(self, xs, axis, ranks):
        assert (axis, ranks) == ("dp", 2)
        return [torch.stack([x, x]) for x in xs]


def operands():
    return [torch.randn(8, 5).t(), torch.randint(0, 9, (5, 2))]


def test_each_operand_has_the_rows_of_all_ranks():
    xs = operands()
    with communicating(Twice()):
        found = dsa.all_gather_many(xs, "dp", 2)
    for got, x in zip(found, xs, strict=True):
        assert torch.equal(got, torch.cat([x, x]))


def test_of_one_rank_they_are_copies():
    xs = operands()
    found = dsa.all_gather_many(xs, "dp", 1)
    for got, x in zip(found, xs, strict=True):
        assert torch.equal(got, x)
        assert got.is_contiguous()
        assert got.data_ptr() != x.data_ptr()


def test_types_follow_from_operands():
    with FakeTensorMode() as mode:
        xs = [mode.from_tensor(x) for x in operands()]
        found = dsa.all_gather_many(xs, "dp", 2)
    assert [(x.shape, x.dtype) for x in found] == [
        ((10, 8), torch.float32),
        ((10, 2), torch.int64),
    ]
    with FakeTensorMode(), pytest.raises(ValueError, match=r"all_gather_many takes operands \[T"):
        dsa.all_gather_many([torch.empty(3)], "dp", 2)
