"""Tapes give, to the last bit, what the functions that they were recorded of give."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dsa_compile.ops import REFERENCE
from dsa_compile.verify.execution import taped_calls
from dsa_compile.verify.execution.exact import ExactArithmetic, ExactTensor, numbers, to_exact
from dsa_compile.verify.execution.taped_calls import Call, TapedCalls
from tests.ops.sample_calls import CASES

Played = list[bool]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Whether each call with a tape was played, with no tapes of other tests; the second of two
    calls that are alike is recorded."""
    found: Played = []
    play = Call.play

    def watched(self: Call, special: Callable[..., Any]) -> Any:
        made = play(self, special)
        found.append(made is not None)
        return made

    monkeypatch.setattr(Call, "play", watched)
    monkeypatch.setattr("dsa_compile.verify.execution.exact._TAPES", TapedCalls())
    monkeypatch.setattr(taped_calls, "_UNRECORDED", 1)
    return found


def exact(value: Any, change: float) -> Any:
    """An argument in exact arithmetic, its numbers scaled; bytes are those of one number a row."""
    if isinstance(value, Tensor) and value.dtype is torch.uint8:
        rows = torch.randn(*value.shape[:-1], 1, dtype=torch.float64) * change
        return ExactTensor(rows.expand(value.shape).clone(), value.dtype)
    made = to_exact(value)
    return ExactTensor(made.wide * change, made.dtype) if isinstance(made, ExactTensor) else made


def copied(args: Sequence[Any]) -> list[Any]:
    def copy(value: Any) -> Any:
        if isinstance(value, ExactTensor):  # with the strides that it has
            wide = torch.empty_strided(value.shape, value.stride(), dtype=torch.float64)
            return ExactTensor(wide.copy_(value.wide), value.dtype)
        return value.clone() if isinstance(value, Tensor) else value

    return [copy(value) for value in args]


def described(*values: Any) -> list[Any]:
    """Everything that may differ of values, in numbers that compare to the bit."""
    found: list[Any] = []
    for value in tree_flatten(values)[0]:
        if isinstance(value, Tensor):
            wide = numbers(value)
            bits = wide.contiguous().view(-1).view(torch.uint8).tolist()
            found += (type(value), value.dtype, tuple(value.shape), value.stride(), bits)
        else:
            found.append(value)
    return found


def op_of(name: str) -> Callable[..., Any]:
    return next(f for op, f in REFERENCE.items() if str(op).split(".")[1] == name)


def untaped(function: Callable[..., Any], args: Sequence[Any], unit: float) -> Any:
    with torch.no_grad(), ExactArithmetic(unit):
        return function(*args)


@pytest.mark.parametrize("unit", [0.0, 2.0**-6])
@pytest.mark.parametrize("case", CASES, ids=[f"{n}-{c.name}" for n, c in enumerate(CASES)])
def test_ops_by_tape_are_what_they_are_without(case: Any, unit: float, played: Played) -> None:
    function = op_of(case.name)
    for change in (1.0, -0.5, 2.0, 3.0):
        args = [exact(value, change) for value in case.args]
        mine, theirs = copied(args), copied(args)
        wanted = untaped(function, mine, unit)
        with torch.no_grad():
            made = ExactArithmetic(unit).run(function, *theirs)
        assert described(made, theirs) == described(wanted, mine)
    if any(isinstance(value, ExactTensor) for value in args):
        assert played[:1] == [False]  # recorded the second time


def test_most_ops_are_played(played: Played) -> None:
    for case in CASES:
        for _ in range(3):
            ExactArithmetic().run(op_of(case.name), *(exact(value, 1.0) for value in case.args))
    assert sum(played) >= 0.9 * (len(played) - sum(played))


def run(function: Callable[..., Any], *args: Any) -> Any:
    return ExactArithmetic().run(function, *args)


def test_what_is_read_on_the_host_tells_calls_apart(played: Played) -> None:
    def rows(x: Tensor, counts: Tensor) -> Tensor:
        return torch.cat([part.sum(0, keepdim=True) for part in x.split(counts.tolist())])

    x = to_exact(torch.randn(6, 2))
    for counts in (torch.tensor([1, 5]), torch.tensor([4, 2]), torch.tensor([1, 5])) * 3:
        wanted = torch.stack([part.sum(0) for part in numbers(x).split(counts.tolist())])
        assert torch.equal(numbers(run(rows, x, counts)), wanted)
    assert any(played)


def test_a_tensor_given_twice_tells_calls_apart(played: Played) -> None:
    def second(x: Tensor, y: Tensor) -> Tensor:
        return y

    one, other = (to_exact(torch.tensor(values)) for values in ([3.0, 4.0], [5.0, 7.0]))
    mode = ExactArithmetic()
    for _ in range(4):
        assert mode.run(torch.mul, one, one).wide.tolist() == [9, 16]
        assert mode.run(torch.mul, one, other).wide.tolist() == [15, 28]
        assert mode.run(second, one, other) is other
        assert mode.run(second, one, one) is one
    assert played.count(True) >= 3


def test_tensors_that_share_memory_tell_calls_apart(played: Played) -> None:
    def cleared(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        before = bool((y > 0).any())
        x.fill_(0)
        after = bool((y > 0).any())
        return z + 1 if before and not after else z + 2

    mode, one = ExactArithmetic(), to_exact(torch.tensor([1.0]))
    for _ in range(8):
        apart = mode.run(
            cleared, torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64), one
        )
        assert apart.wide.tolist() == [3]
    memory = torch.ones(2, dtype=torch.int64)
    assert mode.run(cleared, memory, memory.view(2), one).wide.tolist() == [2]


def test_a_number_made_of_what_is_written_makes_no_tape(played: Played) -> None:
    def written(x: Tensor, z: Tensor) -> Tensor:
        numbers = (x + 0).tolist()
        x.add_(1)
        return z * numbers[0]

    mode, one = ExactArithmetic(), to_exact(torch.tensor([1.0]))
    for value in (1, 1, 1, 1, 1, 1, 2, 3):
        made = mode.run(written, torch.tensor([value]), one)
        assert made.wide.tolist() == [value]
    assert not any(played)


def test_errors_of_ops_whose_results_nobody_takes_are_raised(played: Played) -> None:
    def checked(x: Tensor, wanted: Tensor) -> Tensor:
        torch.ops.aten._assert_async.msg(wanted, "refused")
        return x + 1

    def taken(x: Tensor, place: Tensor) -> Tensor:
        try:
            return x[place.tolist()[0]] + 0
        except IndexError:
            return x[0] * 0

    mode, x = ExactArithmetic(), to_exact(torch.tensor([5.0, 7.0]))
    for _ in range(4):
        mode.run(checked, x, torch.tensor(True))
        assert float(mode.run(taken, x, torch.tensor([9])).wide) == 0
    with pytest.raises(RuntimeError, match="refused"):
        mode.run(checked, x, torch.tensor(False))
    assert float(mode.run(taken, x, torch.tensor([1])).wide) == 7


def test_signs_of_zero_and_random_numbers_are_those_of_each_call(played: Played) -> None:
    def times(x: Tensor, factor: Tensor) -> Tensor:
        return x * factor.item()

    def moved(x: Tensor) -> Tensor:
        return x + torch.rand(1)

    mode, x = ExactArithmetic(), to_exact(torch.tensor([1.0]))
    for value in (0.0, 0.0, 0.0, 0.0, -0.0, 0.0):
        made = mode.run(times, x, to_exact(torch.tensor(value)))
        assert math.copysign(1, float(made.wide)) == math.copysign(1, value)
    assert any(played)
    assert len({float(mode.run(moved, x).wide) for _ in range(6)}) == 6


def test_a_returned_constant_is_each_time_another(played: Played) -> None:
    def constant(x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, torch.tensor([1, 2, 3])[1:]

    mode, x = ExactArithmetic(), to_exact(torch.tensor([1.0]))
    for _ in range(6):
        made = mode.run(constant, x)[1]
        assert made.tolist() == [2, 3]
        made.fill_(9)


def test_shapes_that_numbers_decide_tell_calls_apart(played: Played) -> None:
    def kept(x: Tensor, slots: Tensor) -> Tensor:
        return x.index_select(0, (slots >= 0).nonzero().squeeze(1)).view(-1)

    x = to_exact(torch.randn(3, 2))
    for slots in (torch.tensor([0, -1, 1]), torch.tensor([0, 2, 1])) * 4:
        assert torch.equal(numbers(run(kept, x, slots)), numbers(x)[slots >= 0].flatten())
    assert any(played)


def test_a_computed_number_that_python_decides_by_tells_calls_apart(played: Played) -> None:
    def sign(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3

    ones = torch.ones(3)
    for x in (ones, ones, ones, -ones, ones, -ones):
        wanted = x.double() * (2 if x[0] > 0 else 3)
        assert torch.equal(numbers(run(sign, to_exact(x))), wanted)
    assert played == [False, True, False, True, True]


def test_a_number_read_behind_a_write_makes_no_tape(played: Played) -> None:
    """The write could not be undone where the number is another."""

    def write(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 if x.sum() > 0 else x * 3

    for _ in range(4):
        x = to_exact(torch.ones(2))
        assert numbers(run(write, x)).tolist() == [4.0, 4.0]
        assert numbers(x).tolist() == [2.0, 2.0]
    assert not any(played)


def test_a_number_that_is_known_may_be_read_again_behind_a_write(played: Played) -> None:
    def write(x: Tensor, slots: Tensor) -> Tensor:
        for _ in range(2):
            x.index_add_(0, (slots >= 0).nonzero().squeeze(1), x.new_ones(len(slots)).float()[:1])
        return x * 2

    for slots in (torch.tensor([-1, 3]), torch.tensor([3, -1]), torch.tensor([2, -1])):
        x = to_exact(torch.zeros(2))
        assert numbers(run(write, x, slots)).tolist() == [4.0 * (slot >= 0) for slot in slots]
    assert played == [False, True]


def test_a_copy_that_is_changed_stays_a_copy(played: Played) -> None:
    def changed(x: Tensor) -> tuple[Tensor, Tensor]:
        copy = x.clone()
        copy.mul_(2)
        return copy, x.bfloat16()

    for _ in range(4):
        x = to_exact(torch.ones(2))
        copy, same = run(changed, x)
        copy.wide.mul_(2)
        same.wide.mul_(3)
        assert (numbers(copy).tolist(), numbers(x).tolist()) == ([4.0, 4.0], [1.0, 1.0])
    assert played == [False, True, True]


def test_numbers_of_numpy_are_those_of_each_call(played: Played) -> None:
    def ends(x: Tensor, lengths: Tensor) -> Tensor:
        return x * torch.from_numpy(lengths.numpy() + 1)

    x = to_exact(torch.ones(2))
    for _ in range(3):
        for lengths in (torch.tensor([1, 2]), torch.tensor([3, 4])):
            assert numbers(run(ends, x, lengths)).tolist() == (lengths + 1).tolist()
    assert any(played)
