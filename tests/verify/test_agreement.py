"""Agreement of values: by rows, and of keys by what they are worth."""

import math
from importlib.resources import files
from typing import Any

import pytest
import torch

from dsa_compile.ir.passes import Numerics
from dsa_compile.verify.comparison.agreement import compare, same_bits
from dsa_compile.verify.comparison.tolerances import (
    bitwise_problem,
    exact_problem,
    pass_problem,
)


def test_one_wrong_row_is_seen() -> None:
    theirs = torch.ones(100, 8)
    ours = theirs.clone()
    ours[7] *= 1.5
    found = compare(theirs, ours, 100)
    assert (found.bitwise, found.error, found.typical) == (False, 0.5, 0.0)


def test_rows_are_found_behind_heads() -> None:
    theirs = torch.ones(1, 4, 9, 2)
    ours = theirs.clone()
    ours[:, :, 3] = 2.0
    assert compare(theirs, ours, 9).error == 1.0


def test_another_shape_of_as_many_elements_agrees() -> None:
    theirs = torch.randn(1, 9, 4, 2)
    assert compare(theirs, theirs.view(9, 8), 9).bitwise


def test_nan_agrees_with_nan_alone() -> None:
    theirs = torch.tensor([[1.0, math.nan], [1.0, 1.0]])
    assert compare(theirs, theirs.clone(), 2).bitwise
    assert compare(theirs, torch.ones(2, 2), 2).error == math.inf
    assert compare(torch.ones(2, 2), theirs, 2).error == math.inf


def test_keys_are_sets_without_repetition() -> None:
    theirs = torch.tensor([[4, 2, 9, -1], [1, 2, 3, 4]], dtype=torch.int32)
    ours = torch.tensor([[2, 9, 4, -1], [1, 2, 3, 5]], dtype=torch.int32)
    found = compare(theirs, ours, 2)
    assert (found.bitwise, found.error, found.overlap) == (False, 0.0, 0.75)
    twice = torch.tensor([[2, 2, 4, -1], [1, 2, 3, 5]], dtype=torch.int32)
    assert compare(theirs, twice, 2).error == math.inf


def test_another_type_does_not_agree() -> None:
    assert compare(torch.ones(2, 2), torch.ones(2, 2).double(), 2).error == math.inf
    assert compare(torch.ones(2, 2), torch.ones(2, 3), 2).error == math.inf


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_of_another_sign_are_not_the_same_bits(dtype: torch.dtype) -> None:
    theirs, ours = torch.tensor([[1.0, 0.0]]).to(dtype), torch.tensor([[1.0, -0.0]]).to(dtype)
    assert same_bits(theirs, theirs.clone())
    assert not same_bits(theirs, ours)
    found = compare(theirs, ours, 1)
    assert (found.bitwise, found.error, found.max_abs) == (False, 0.0, 0.0)


def test_nans_are_the_same_by_their_bits() -> None:
    theirs = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    ours = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert same_bits(theirs, theirs.clone())
    assert not same_bits(theirs, ours)
    found = compare(theirs, ours, 2)
    assert (found.bitwise, found.error) == (False, 0.0)


def test_bits_lie_where_strides_say() -> None:
    value = torch.randn(4, 6)
    assert same_bits(value.t(), value.t().contiguous())
    assert not same_bits(value, value.t())
    assert not same_bits(value, value.view(torch.int32))
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
    assert same_bits(torch.ones(1).expand(3), torch.ones(3))
    assert same_bits(torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool))


def test_a_bitwise_rewrite_keeps_the_sign_of_zero() -> None:
    found = compare(torch.zeros(2, 2), -torch.zeros(2, 2), 2)
    wanted = "is not equal to the last bit: signs of zeros, or NaNs"
    assert bitwise_problem(found) == wanted
    assert pass_problem(Numerics.BITWISE, found, exact=False) == wanted
    assert exact_problem(found, None) == ""
    assert pass_problem(Numerics.TOLERANCE, found, exact=True) == ""
    found = compare(torch.zeros(2, 2), torch.ones(2, 2), 2)
    assert bitwise_problem(found) == "is not equal to the last bit"


def test_a_reproducer_compares_bits(capsys: pytest.CaptureFixture[str]) -> None:
    path = files("dsa_compile.verify.bisect") / "reproduce.txt"
    names: dict[str, Any] = {"__name__": "reproduce", "__file__": str(path)}
    exec(path.read_text(encoding="utf-8"), names)
    show = names["show"]
    odd = torch.tensor([0.0, math.nan])
    assert show("x", odd, odd.clone())
    assert show("x", torch.tensor(1.0), torch.tensor(1.0))
    assert not show("x", odd, torch.tensor([-0.0, math.nan]))
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("x: 1 of 2 differ")
    assert told.endswith("most in element 0: 0.0 before, -0.0 after")
    assert not show("x", torch.tensor([1.0, 2.0, math.nan]), torch.tensor([1.5, 9.0, math.nan]))
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith("most in element 1: 2.0 before, 9.0 after"), "the largest, not the first"
