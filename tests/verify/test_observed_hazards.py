"""Hazards that are seen when regions run, whatever the planner and the checker of streams hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir import hazards_streams, storage, streams
from dsa_compile.ir.hazards import find_hazards
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.streams import has_streams
from dsa_compile.ops import KEEP_ALIVE, WAIT_EVENT
from dsa_compile.passes import overlap_streams
from dsa_compile.runtime.execution.streams import StreamSwitch
from dsa_compile.verify.checks.hazard_check import STREAMS, illegal
from dsa_compile.verify.execution.replay import Replay
from examples.small_models.models import save_hf, tiny_config, tiny_model
from tests.verify.launch_order import graph_hazards

Patch = pytest.MonkeyPatch
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 8,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    """One MoE layer, wide enough to be overlapped."""
    path: Path = tmp_path_factory.mktemp("wide") / "model"
    save_hf(tiny_model(tiny_config(1, first_k_dense_replace=0, **WIDE)), path)
    return path


def program(model: Path, recipe: str) -> Program:
    return build_program(model, CompileConfig(recipe=recipe, target="sm_90a", records=False))


@pytest.fixture(scope="module")
def exported(model: Path) -> Program:
    return program(model, "bf16")


@pytest.fixture(scope="module")
def replay(exported: Program) -> Replay:
    return Replay(exported)


@pytest.fixture
def region(replay: Replay) -> Region:
    return replay.final.regions["moe.long"]


def test_a_healthy_program_has_none(replay: Replay) -> None:
    assert list(illegal(replay)) == []
    assert [h for region in replay.final.regions.values() for h in graph_hazards(region)] == []


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "fp8-kv-tensor"])
def test_no_recipe_leaves_any(model: Path, recipe: str) -> None:
    regions = Replay(program(model, recipe)).final.regions.values()
    assert any(has_streams(region.graph) for region in regions)
    assert [h for region in regions for h in graph_hazards(region)] == []


def without(region: Region, number: int, target: object) -> Region:
    """A copy that lacks one stream op."""
    graph = fx.Graph()
    outputs = graph.graph_copy(region.graph, {})
    graph.output(outputs)
    graph.erase_node([node for node in graph.nodes if node.target is target][number])
    return Region(region.name, graph, region.outputs)


@pytest.mark.parametrize("target", [WAIT_EVENT, KEEP_ALIVE])
def test_every_wait_and_hold_is_missed(region: Region, target: object) -> None:
    count = sum(node.target is target for node in region.graph.nodes)
    assert count
    for number in range(count):
        broken = without(region, number, target)
        assert graph_hazards(broken), number


def cache_reads_not_seen(patch: Patch) -> None:
    """Fault: reads of a cache by a call are not counted."""
    right = storage.Memory._operator

    def operator(self: Any, index: int, node: fx.Node, op: Any) -> None:
        right(self, index, node, op)
        if node in self.uses:
            caches = {n for n in node.all_input_nodes if n.meta.get("role") is Role.CACHE}
            self.uses[node].reads -= set(self.holds(*caches))

    patch.setattr(storage.Memory, "_operator", operator)


def writes_not_seen(patch: Patch) -> None:
    """Fault: a write in place counts as a read."""
    right = storage.Memory._operator

    def operator(self: Any, index: int, node: fx.Node, op: Any) -> None:
        right(self, index, node, op)
        if node in self.uses:
            self.uses[node].reads |= self.uses[node].writes
            self.uses[node].writes = set()

    patch.setattr(storage.Memory, "_operator", operator)


def nothing_freed_early(patch: Patch) -> None:
    """Fault: memory is thought to live as long as the region."""
    for module in (hazards_streams, overlap_streams):
        patch.setattr(module, "early_frees", lambda memory, time: iter(()))


def foreign_reads_not_seen(patch: Patch) -> None:
    """Fault: memory that another stream only reads may be given out."""
    right = hazards_streams.early_frees

    def early(*args: Any) -> list[Any]:
        with patch.context() as inside:
            inside.setattr(storage.Uses, "touches", lambda uses: set(uses.writes))
            return list(right(*args))

    for module in (hazards_streams, overlap_streams):
        patch.setattr(module, "early_frees", early)


def waits_know_all_of_a_stream(patch: Patch) -> None:
    """A wait is thought to be for all that its event's stream was given up to now."""
    right = streams.Timeline._event

    def event(self: Any, node: fx.Node, stream: int) -> None:
        right(self, node, stream)
        found = self.waits.get(node)
        for other, tick in self._clocks[found.stream].items() if found else ():
            self._clocks[stream][other] = max(self._clocks[stream].get(other, 0), tick)

    patch.setattr(streams.Timeline, "_event", event)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        cache_reads_not_seen,
        writes_not_seen,
        nothing_freed_early,
        foreign_reads_not_seen,
        waits_know_all_of_a_stream,
    ],
)
def test_a_fault_of_planner_and_checker_is_seen(
    exported: Program, monkeypatch: Patch, fault: Callable[[Patch], None]
) -> None:
    fault(monkeypatch)
    planned = Replay(exported)
    regions = planned.final.regions.values()
    assert not [h for r in regions for h in find_hazards(r)], "not blind"
    assert [h for r in regions for h in graph_hazards(r)]


def waits_for_nothing(patch: Patch) -> None:
    patch.setattr(StreamSwitch, "_wait_event", lambda self, event: None)


def waits_on_the_main_stream(patch: Patch) -> None:
    patch.setattr(
        StreamSwitch, "_wait_event", lambda self, event: self._events[event].wait(self._main)
    )


def event_kept_from_the_last_call(patch: Patch) -> None:
    right = StreamSwitch._record_event

    def record(self: StreamSwitch, event: int) -> None:
        if event not in self._events:
            right(self, event)

    patch.setattr(StreamSwitch, "_record_event", record)


def never_leaves_the_main_stream(patch: Patch) -> None:
    """Streams are not switched: all calls in order, which is slow."""
    patch.setattr(StreamSwitch, "_on_stream", lambda self, stream: None)


@pytest.mark.parametrize(
    "fault",
    [
        waits_for_nothing,
        waits_on_the_main_stream,
        event_kept_from_the_last_call,
        never_leaves_the_main_stream,
    ],
)
def test_a_fault_of_the_runtime_is_no_pass(
    replay: Replay, monkeypatch: Patch, fault: Callable[[Patch], None]
) -> None:
    fault(monkeypatch)
    found = list(illegal(replay))
    assert {hazard.pass_name for hazard in found} == {STREAMS}
