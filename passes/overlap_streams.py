"""Run independent calls of a region side by side, on two streams.

Before::                            After::

    x = dsa.linear_fp8(…)               x = dsa.linear_fp8(…)
    y = dsa.linear_fp8(x, …)            dsa.record_event(0)
    z = dsa.rms_norm(x, …)              y = dsa.linear_fp8(x, …)
    w = dsa.add_rms_norm(y, z, …)       dsa.on_stream(1)
                                        dsa.wait_event(0)
                                        z = dsa.rms_norm(x, …)
                                        dsa.record_event(1)
                                        dsa.on_stream(0)
                                        dsa.wait_event(1)
                                        w = dsa.add_rms_norm(y, z, …)

A decode step is a chain of kernels, and the small ones leave most of the GPU idle. What does not
depend on one another, by data or through a cache, may overlap: the indexer's head weights with the
first projection, its queries' quantisation with the attention's queries. Where each call goes is
decided by a model (:mod:`dsa_compile.passes.stream_schedule`) on the costs of calls
(:mod:`dsa_compile.passes.stream_costs`), estimated or measured, waits between streams included. A region
that would gain too little is left as it is.

The order of calls stays one that a single stream could run. Tensors that another stream may still
read are held by ``dsa.keep_alive``. :mod:`dsa_compile.ir.hazards` checks the result.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import fx

from dsa_compile.facts.config import GPUS
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.hazards import COLLECTIVES
from dsa_compile.ir.hazards_streams import early_frees
from dsa_compile.ir.passes import Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.storage import Memory, Storage
from dsa_compile.ir.stream_profile import Profile
from dsa_compile.ir.streams import MAIN, Moment, Timeline, has_streams
from dsa_compile.ops import KEEP_ALIVE, ON_STREAM, RECORD_EVENT, WAIT_EVENT
from dsa_compile.passes.stream_costs import DEVICES, CostModel, Device
from dsa_compile.passes.stream_schedule import Schedule, Task, schedule, serial, waits


class OverlapStreams(RegionPass):
    """Put calls on side streams where a model of the step says that it is faster."""

    numerics = Numerics.BITWISE
    targets = GPUS

    def __init__(self, streams: int = 2) -> None:
        """Plan for so many streams, the main one included."""
        if streams < 1:
            raise ValueError(f"streams={streams} should be at least 1")
        self.streams = streams

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Plan one region."""
        if has_streams(edit.graph):
            return
        model, source = _model(DEVICES[program.config.target], program)
        memory = Memory(edit.graph)
        tasks = region_tasks(memory, model)
        plan = schedule(tasks, self.streams)
        aside = [_label(n) for n, s in zip(memory.uses, plan.streams[1:], strict=False) if s]
        if not aside:
            return
        edit.begin_site()
        edit.remark(
            f"{', '.join(aside)} beside the rest; {serial(tasks).us:.0f} µs of work in "
            f"{plan.us:.0f} µs by {source}"
        )
        place(edit, memory, tasks, plan)
        edit.close_site()


def _label(node: fx.Node) -> str:
    """A call to read: its op, and the last of its module path."""
    path = str(node.meta.get("path") or "").rpartition(".")[2]
    return f"{getattr(node.target, '_opname', node.name)} {path}".strip()


def _model(device: Device, program: Program) -> tuple[CostModel, str]:
    """The costs to plan by, and what they are, to read."""
    config = program.config
    if config.profile is None:
        return CostModel(device, config.block_size), "estimated costs"
    path = Path(config.profile)
    profile = Profile.load(path, config.target)
    model = CostModel(device, config.block_size, profile.tokens, profile.context, profile.calls)
    return model, f"costs measured on {profile.device}, {path.name} {profile.digest()[:12]}"


def region_tasks(memory: Memory, model: CostModel) -> list[Task]:
    """The region's beginning, its calls, its end."""
    number = {node: index for index, node in enumerate(memory.uses, start=1)}
    tasks = [Task(0.0, False, 0.0, frozenset(), pinned=True)]
    for node, before in memory.dependencies().items():
        cost = model.of(node)
        # a result lives on in the caller, whose stream is 0; there ranks meet in one order too
        pinned = not memory.results.isdisjoint(memory.uses[node].makes)
        pinned |= node.target in COLLECTIVES
        after = frozenset({0, *(number[other] for other in before)})
        tasks.append(Task(cost.us, cost.fills, cost.load, after, pinned))
    return [*tasks, Task(0.0, False, 0.0, frozenset(range(len(tasks))), pinned=True)]


def place(edit: Editor, memory: Memory, tasks: Sequence[Task], plan: Schedule) -> None:
    """Bring a region into the order of a plan, with streams, events and lifetimes.

    Args:
        edit: the region, in which no streams are.
        memory: of the region.
        tasks: as from :func:`region_tasks`.
        plan: of these tasks.
    """
    _emit(edit, list(memory.uses), tasks, plan)
    _hold(edit)


def _emit(edit: Editor, calls: Sequence[fx.Node], tasks: Sequence[Task], plan: Schedule) -> None:
    needed = waits(tasks, plan.order, plan.streams)
    awaited = {other for others in needed.values() for other in others}
    events: Mapping[int, int] = {
        task: event for event, task in enumerate(t for t in plan.order if t in awaited)
    }
    end = edit.graph.output_node()
    pending = dict.fromkeys(n for n in edit.graph.nodes if n.op == "call_function")

    def move(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in pending:
                move(source)
        del pending[node]
        end.prepend(node)

    current = MAIN
    for task in plan.order:
        if plan.streams[task] != current:
            current = plan.streams[task]
            edit.call(ON_STREAM, current, before=end, path="")
        for other in needed.get(task, ()):
            edit.call(WAIT_EVENT, events[other], before=end, path="")
        if 1 <= task <= len(calls):
            move(calls[task - 1])
        if task in events:
            edit.call(RECORD_EVENT, events[task], before=end, path="")
    for node in list(pending):  # views for the results
        if node in pending:
            move(node)


def _hold(edit: Editor) -> None:
    """Keep tensors until the stream that they were made on has waited for their other uses."""
    memory = Memory(edit.graph)
    time = Timeline(edit.graph, memory.uses)
    until: dict[Storage, Moment] = {}
    for storage, home, use, _ in early_frees(memory, time):
        after = (m for m in time.of_stream(home) if m.index > use.index and m.follows(use))
        moment = next(after, time.moments[-1])
        until[storage] = max(moment, until.get(storage, moment), key=lambda m: m.index)
    held = defaultdict(list)
    for storage, moment in until.items():
        held[moment.node].append(memory.holder(storage))
    for node, tensors in held.items():
        edit.call(KEEP_ALIVE, tensors, before=node, path="")
