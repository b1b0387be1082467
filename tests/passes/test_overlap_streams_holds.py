"""Tensors held for another stream stand in one order, whatever the addresses of nodes are."""

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.printer import region_to_python
from dsa_compile.ir.storage import Memory
from dsa_compile.ops import KEEP_ALIVE
from dsa_compile.passes.overlap_streams import place, region_tasks
from dsa_compile.passes.stream_costs import Cost
from dsa_compile.passes.stream_schedule import Schedule
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa
TRIES = 24  # two results are in the wrong order in half of them, if their order is left to chance


@region("dense", value("x", "T", 8), value("y", "T", 8), weight("a", 8, 8), weight("c", 8))
def read_beside(x, y, a, c):
    """Both results of the first call are read on another stream, while its own goes on."""
    normed, total = dsa.add_rms_norm.default(x, y, c, 1e-6)
    side = aten.mul.Tensor(normed, total)
    main = dsa.linear.default(x, a)
    return aten.add.Tensor(dsa.linear.default(main, a), side)


class SameCost:
    def of(self, node: fx.Node) -> Cost:
        return Cost(1.0, False, 0.1)


def test_what_is_held_together_is_named_in_the_order_it_was_made() -> None:
    kept = []  # so that no address comes twice
    texts = set()
    for _ in range(TRIES):
        program = fragment(read_beside)
        made = program.regions["dense"]
        memory = Memory(made.graph)
        tasks = region_tasks(memory, SameCost())
        assert len(tasks) == 7
        plan = Schedule(tuple(range(7)), (0, 0, 1, 0, 0, 0, 0), 1.0)
        place(Editor(made, program.world, "overlap_streams"), memory, tasks, plan)
        (hold,) = [node for node in made.graph.nodes if node.target is KEEP_ALIVE]
        assert len(hold.args[0]) == 2
        texts.add(region_to_python(made))
        kept.append((program, [object() for _ in range(len(kept))]))
    assert len(texts) == 1


def test_ranks_meet_on_stream_0() -> None:
    @region("dense", value("x", "T", 8), weight("a", 8, 8))
    def sketch(x, a):
        total = dsa.all_reduce.default(dsa.linear.default(x, a), "tp", 2)
        return aten.add.Tensor(total, dsa.linear.default(x, a))

    memory = Memory(fragment(sketch).regions["dense"].graph)
    tasks = region_tasks(memory, SameCost())[1:-1]
    pinned = {node.target for node, task in zip(memory.uses, tasks, strict=True) if task.pinned}
    assert pinned == {dsa.all_reduce.default, aten.add.Tensor}  # the second is what is returned
