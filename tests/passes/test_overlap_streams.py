"""Overlapped regions: what is moved, that results stay, and that every wait is needed."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.graph_json import region_from_json, region_to_json
from dsa_compile.ir.hazard import HazardKind
from dsa_compile.ir.hazards import find_hazards
from dsa_compile.ir.printer import region_to_python
from dsa_compile.ir.program import add_input
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.storage import Memory
from dsa_compile.ops import KEEP_ALIVE, STREAM_OPS, WAIT_EVENT
from dsa_compile.passes.overlap_streams import OverlapStreams, place, region_tasks
from dsa_compile.passes.stream_costs import Cost
from dsa_compile.passes.stream_schedule import Schedule, makespan, schedule
from dsa_compile.verify.comparison.agreement import same_bits
from tests.passes.sketch import (
    Fragment,
    RandomParameters,
    execute,
    fragment,
    random_inputs,
    region,
    value,
    weight,
)

aten, dsa = torch.ops.aten, torch.ops.dsa
GPU = CompileConfig(target="sm_90a")


@region("dense", value("x", "T", 8), weight("a", 8, 8), weight("c", 8))
def two_chains(x, a, c):
    """The shorter one can run beside the other."""
    left, right = x, x
    for _ in range(4):
        left = dsa.linear.default(left, a)
    for _ in range(3):
        right = dsa.rms_norm.default(right, c, 1e-6)
    return aten.add.Tensor(left, right)


def overlapped(config: CompileConfig = GPU) -> Fragment:
    program = fragment(two_chains, config=config)
    OverlapStreams()(program)
    return program


def calls(made: Region, *targets: object) -> list[fx.Node]:
    return [node for node in made.graph.nodes if node.target in targets]


def test_independent_work_runs_beside() -> None:
    text = region_to_python(overlapped().regions["dense"])
    body = text[text.index("):") :].splitlines()
    lines = [line.partition("  #")[0].strip().replace("_default", "") for line in body[1:]]
    assert lines == [
        "ops.dsa.record_event(0)",
        "linear = ops.dsa.linear(x, a)",
        "linear_1 = ops.dsa.linear(linear, a)",
        "linear_2 = ops.dsa.linear(linear_1, a)",
        "linear_3 = ops.dsa.linear(linear_2, a)",
        "",
        "ops.dsa.on_stream(1)",
        "ops.dsa.wait_event(0)",
        "rms_norm = ops.dsa.rms_norm(x, c, eps=1e-06)",
        "rms_norm_1 = ops.dsa.rms_norm(rms_norm, c, eps=1e-06)",
        "rms_norm_2 = ops.dsa.rms_norm(rms_norm_1, c, eps=1e-06)",
        "ops.dsa.record_event(1)",
        "",
        "ops.dsa.on_stream(0)",
        "ops.dsa.wait_event(1)",
        "add_tensor = ops.aten.add.Tensor(linear_3, rms_norm_2)",
        "return (add_tensor,)",
    ]
    assert "ops.dsa.wait_event(0)  # stream 0: the inputs" in text
    assert "ops.dsa.wait_event(1)  # stream 1: rms_norm_default_2" in text


def test_results_stay() -> None:
    before, after = fragment(two_chains), overlapped()
    tensors = random_inputs(before)
    wanted = execute(before, None, RandomParameters(before), tensors)
    assert same_bits(
        execute(after, None, RandomParameters(after), tensors)["logits"], wanted["logits"]
    )


def test_nothing_is_left_to_do() -> None:
    program = overlapped()
    text = region_to_python(program.regions["dense"])
    assert OverlapStreams()(program).rewrites == 0
    assert region_to_python(program.regions["dense"]) == text


def test_a_cpu_has_no_streams() -> None:
    assert not OverlapStreams().runs(CompileConfig())
    assert OverlapStreams().runs(CompileConfig(target="sm_90a"))


def test_a_chain_is_left_alone() -> None:
    @region("dense", value("x", "T", 8), weight("c", 8))
    def chain(x, c):
        for _ in range(4):
            x = dsa.rms_norm.default(x, c, 1e-6)
        return x

    program = fragment(chain, config=GPU)
    assert OverlapStreams()(program).rewrites == 0


def test_an_overlapped_region_survives_storage() -> None:
    made = overlapped().regions["dense"]
    again = region_from_json(region_to_json(made))
    assert region_to_json(again) == region_to_json(made)
    assert list(find_hazards(again)) == []


@pytest.mark.parametrize("which", [0, 1])
def test_a_graph_without_one_of_its_waits_is_a_hazard(which: int) -> None:
    made = overlapped().regions["dense"]
    made.graph.erase_node(calls(made, WAIT_EVENT)[which])
    assert list(find_hazards(made))


@dataclass
class Drawn:
    """A model of costs that hands out what was drawn."""

    costs: list[Cost]

    def of(self, node: fx.Node) -> Cost:
        return self.costs.pop()


@st.composite
def regions(draw: st.DrawFn) -> tuple[Region, FakeWorld]:
    """Elementwise work, views, writes and reads of a cache, with two results."""
    world = FakeWorld()
    made = Region("moe.long", fx.Graph(), ("hidden", "normed"))
    slots = add_input(made, world, Role.BATCH, "slots", ("T",), torch.int64)
    cache = add_input(made, world, Role.CACHE, "cache", ("P", 4, 8), torch.float32)
    values = [
        add_input(made, world, Role.VALUE, f"x{i}", ("T", 8), torch.float32) for i in range(2)
    ]
    end = made.graph.output(tuple(values))
    edit = Editor(made, world, "sketch")
    for _ in range(draw(st.integers(2, 14))):
        one, two = (draw(st.sampled_from(values)) for _ in range(2))
        kind = draw(st.sampled_from(("add", "relu", "view", "split", "write", "read")))
        if kind == "add":
            values.append(edit.call(aten.add.Tensor, one, two, before=end))
        elif kind == "relu":
            values.append(edit.call(aten.relu.default, one, before=end))
        elif kind == "view":
            values.append(edit.call(aten.view.default, one, [-1, 8], before=end))
        elif kind == "split":
            parts = edit.call(aten.split_with_sizes.default, one, [2, 6], -1, before=end)
            halves = edit.unpack(parts, "left", "right", before=end)
            values.append(edit.call(aten.cat.default, halves[::-1], -1, before=end))
        elif kind == "write":
            edit.call(dsa.write_index_cache.default, one, cache, slots, before=end)
        else:
            total = edit.call(aten.sum.dim_IntList, cache, [0, 1], before=end)
            values.append(edit.call(aten.add.Tensor, one, total, before=end))
    end.args = (tuple(draw(st.sampled_from(values)) for _ in range(2)),)
    return made, world


COSTS = st.builds(Cost, st.floats(0.1, 30.0), st.booleans(), st.floats(0.0, 1.0))
PROPERTY = settings(max_examples=150, deadline=None, database=None)


def put_on_streams(drawn: tuple[Region, FakeWorld], data: st.DataObject, best: bool) -> Region:
    made, world = drawn
    memory = Memory(made.graph)
    count = len(memory.uses)
    tasks = region_tasks(memory, Drawn(data.draw(st.lists(COSTS, min_size=count, max_size=count))))
    plan = schedule(tasks, 3)
    if not best:  # any streams at all
        free = [st.just(0) if task.pinned else st.integers(0, 2) for task in tasks]
        streams = tuple(data.draw(st.tuples(*free)))
        plan = Schedule(plan.order, streams, makespan(tasks, plan.order, streams))
    place(Editor(made, world, "overlap_streams"), memory, tasks, plan)
    made.graph.lint()
    return made


@PROPERTY
@given(regions(), st.data(), st.booleans())
@pytest.mark.slow
def test_every_plan_is_free_of_hazards(
    drawn: tuple[Region, FakeWorld], data: st.DataObject, best: bool
) -> None:
    before = [n.name for n in drawn[0].graph.nodes]
    made = put_on_streams(drawn, data, best)
    assert list(find_hazards(made)) == []
    kept = [n.name for n in made.graph.nodes if n.target not in STREAM_OPS]
    assert sorted(kept) == sorted(before)


@PROPERTY
@given(regions(), st.data())
@pytest.mark.slow
def test_no_wait_can_be_left_out(drawn: tuple[Region, FakeWorld], data: st.DataObject) -> None:
    made = put_on_streams(drawn, data, best=False)
    waits = calls(made, WAIT_EVENT)
    if waits:
        made.graph.erase_node(data.draw(st.sampled_from(waits)))
        assert list(find_hazards(made))


@PROPERTY
@given(regions(), st.data())
@pytest.mark.slow
def test_no_tensor_can_be_let_go(drawn: tuple[Region, FakeWorld], data: st.DataObject) -> None:
    made = put_on_streams(drawn, data, best=False)
    holds = calls(made, KEEP_ALIVE)
    if holds:
        hold = data.draw(st.sampled_from(holds))
        tensors = list(hold.args[0])
        dropped = data.draw(st.sampled_from(tensors))
        hold.args = ([tensor for tensor in tensors if tensor is not dropped],)
        found = list(find_hazards(made))
        assert {hazard.kind for hazard in found} == {HazardKind.FREED_EARLY}
