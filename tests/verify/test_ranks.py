"""All ranks in one process: values that differ along one axis of a layout, the other, or both."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import DP, ONE_RANK, TP, WORLD, Layout, numbers_along
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ops import COMBINE
from dsa_compile.verify.bisect import reproducer
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.comparison.agreement import compare
from dsa_compile.verify.execution.ranks import Ranks, at_numbers, on_ranks
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.parameters import RandomParameters, WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from examples.small_models.models import tiny_config

dsa = torch.ops.dsa
LAYOUT = Layout(tp=2, dp=3)
OF_EACH = Ranks((torch.full((2, 2), float(rank)) for rank in range(6)), WORLD)
OF_LANES = Ranks((torch.full((2, 2), float(lane)) for lane in range(3)), DP)
OF_PLACES = Ranks((torch.full((2, 2), float(place)) for place in range(2)), TP)


def collective(op: Any, x: Any, axis: str) -> Any:
    return on_ranks(op, COMBINE[op])(x, axis, LAYOUT.along(axis))


def rows(xs: list[Any], axis: str) -> list[Any]:
    found: list[Any] = collective(dsa.all_gather_many.default, xs, axis)
    return found


def firsts(value: Any) -> Any:
    """The first number of each rank's tensor, and along which axis they differ."""
    if isinstance(value, Ranks):
        return value.axis, [float(each[0, 0]) for each in value]
    return float(value[0, 0])


def test_numbers_of_ranks_follow_the_layout() -> None:
    assert numbers_along({}) == ({},)
    assert numbers_along({DP: 2}) == ({DP: 0}, {DP: 1})
    every = tuple(LAYOUT.numbers(rank) for rank in range(6))
    for sizes in ({TP: 2, DP: 3}, {WORLD: 6, TP: 2}, {DP: 3, WORLD: 6}):
        assert numbers_along(sizes) == every


def test_values_of_two_axes_are_one_for_each_rank() -> None:
    found = on_ranks(torch.add)(OF_LANES, OF_PLACES, alpha=10)
    assert firsts(found) == (WORLD, [0, 10, 1, 11, 2, 12])
    assert firsts(on_ranks(torch.add)(OF_EACH, OF_LANES)) == (WORLD, [0, 1, 3, 4, 6, 7])
    assert firsts(on_ranks(torch.neg)(OF_LANES)) == (DP, [0, -1, -2])
    assert at_numbers([OF_EACH, OF_LANES], LAYOUT.numbers(5))[1][0, 0] == 2


@pytest.mark.parametrize(
    ("x", "axis", "wanted"),
    [
        (OF_EACH, TP, (DP, [1, 5, 9])),
        (OF_EACH, DP, (TP, [6, 9])),
        (OF_LANES, DP, 3),
        (OF_LANES, TP, (DP, [0, 2, 4])),
        (OF_PLACES, DP, (TP, [0, 3])),
        (OF_PLACES[1], DP, 3),
    ],
)
def test_sums_along_one_axis_leave_the_other(x: Any, axis: str, wanted: Any) -> None:
    assert firsts(collective(dsa.all_reduce.default, x, axis)) == wanted


def test_lanes_get_their_rows_of_a_sum() -> None:
    rows = Ranks((torch.arange(6.0)[:, None] + 10 * place for place in range(2)), TP)
    found = collective(dsa.reduce_scatter.default, rows, DP)
    assert firsts(found) == (WORLD, [0, 30, 6, 36, 12, 42])
    assert firsts(collective(dsa.all_reduce.default, found, TP)) == (DP, [30, 42, 54])


def test_ranks_that_are_numbered_in_another_order_have_values_by_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def place_by_place(self: Layout, rank: int) -> dict[str, int]:
        lane, place = divmod(rank, self.tp)
        return {TP: place, DP: lane, WORLD: place * self.dp + lane}

    monkeypatch.setattr(Layout, "numbers", place_by_place)
    assert [n[WORLD] for n in numbers_along({TP: 2, DP: 3})] == [*range(6)]
    found = on_ranks(torch.add)(OF_LANES, OF_PLACES, alpha=10)
    assert firsts(found) == (WORLD, [0, 1, 2, 10, 11, 12])
    assert firsts(collective(dsa.all_reduce.default, found, TP)) == (DP, [10, 12, 14])
    assert firsts(collective(dsa.all_reduce.default, found, DP)) == (TP, [3, 33])
    rows = Ranks((torch.arange(6.0)[:, None] + 10 * place for place in range(2)), TP)
    scattered = collective(dsa.reduce_scatter.default, rows, DP)
    assert firsts(scattered) == (WORLD, [0, 6, 12, 30, 36, 42])


def test_a_group_gets_values_in_the_order_in_which_it_lists_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = Layout.group
    monkeypatch.setattr(Layout, "group", lambda *args: listed(*args)[::-1])
    (found,) = rows([OF_LANES], DP)
    assert found[::2, 0].tolist() == [2, 1, 0]
    assert firsts(collective(dsa.all_reduce.default, OF_EACH, TP)) == (DP, [1, 5, 9])


def test_values_of_different_axes_are_compared_by_rank() -> None:
    spread = on_ranks(lambda lane, place: lane.clone())(OF_LANES, OF_PLACES)
    assert spread.axis == WORLD
    assert compare(OF_LANES, spread, 2).bitwise
    assert not compare(OF_PLACES, spread, 2).bitwise


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], ModuleType]:
    """A reproducer whose two sides are these lines."""

    def made(body: str) -> ModuleType:
        for side in reproducer.SIDES:
            code = f"def {side}(x):\n    return ({body},)\n"
            (tmp_path / f"{side}.py").write_text(code)
        module = ModuleType("reproduce")
        module.__file__ = str(tmp_path / "reproduce.py")
        exec(reproducer._SCRIPT.read_text(), module.__dict__)
        return module

    return made


@pytest.mark.parametrize("axis", [TP, DP])
def test_operands_that_travel_together_meet_each_its_like(axis: str) -> None:
    alike = torch.arange(2.0)[:, None]
    xs = [OF_EACH, OF_LANES, OF_PLACES, alike]
    for got, x in zip(rows(xs, axis), xs, strict=True):
        (wanted,) = rows([x], axis)
        for numbers in numbers_along({TP: 2, DP: 3}):
            assert torch.equal(at_numbers(got, numbers), at_numbers(wanted, numbers))


@pytest.mark.parametrize("x", [OF_EACH, OF_LANES, OF_PLACES])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("axis", [TP, DP])
def test_ranks_of_a_reproducer_meet(
    script: Callable[[str], ModuleType], x: Ranks, op: str, axis: str
) -> None:
    if op == "reduce_scatter":
        x = on_ranks(partial(torch.repeat_interleave, repeats=3, dim=0))(x)
    module = script(f"ops.dsa.{op}(x, '{axis}', {LAYOUT.along(axis)})")
    tensors: dict[str, Tensor] = {}
    stored = json.loads(json.dumps(reproducer._stored("x", x, tensors)))
    given = {"x": module.value(stored, tensors)}
    # as where the other side's inputs differ between all ranks
    numbers = numbers_along({TP: 2, DP: 3})
    found = module.run("before", given, numbers)
    wanted = collective(getattr(dsa, op).default, x, axis)
    for rank, (each,) in enumerate(found):
        assert torch.equal(each, at_numbers(wanted, numbers[rank]))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2),
        Layout(tp=2, dp=2, ep=4),
        pytest.param(Layout(dp=2, ep=2), marks=pytest.mark.slow),
        pytest.param(Layout(tp=2, dp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_lanes_together_are_one_rank(tmp_path: Path, layout: Layout) -> None:
    """The program that ``place`` is given is that of one rank, so what it makes is held to that."""
    tiny_config(1, first_k_dense_replace=0).save_pretrained(tmp_path)
    config = CompileConfig(
        target="cpu", weights="none", layout=layout, records=False, block_size=16,
        stop_after="place",
    )  # fmt: skip
    program = build_program(tmp_path, config)
    alone = Replay(
        program.fork(replace(config, layout=ONE_RANK, stop_after="insert_paged_caches"))
    ).final
    replay = Replay(program)
    assert replay.runs[-1].step.name == "place"
    before = replay.runs[-1].before
    assert before.weights == alone.weights
    for name, region in alone.regions.items():
        assert region_to_json(before.regions[name]) == region_to_json(region)
    store = WeightStore(RandomParameters(program.spec, [0]))
    tokens = random_tokens(program.spec.index_topk + 4, program.spec.vocab_size)
    prompt = Prompt.of(tokens, program.spec.index_topk, 16)
    report = verify(replay, store, prompt, only=("place",))
    assert report.ok
    assert {site.number for site in report.sites} == {site.number for site in replay.runs[-1].sites}
