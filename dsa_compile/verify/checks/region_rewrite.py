"""A rewrite of several graphs: the call that shows it best, its whole graph before and after."""

from torch import Tensor

from dsa_compile.ir.region import Region, Role
from dsa_compile.verify.checks.rewrite_run import SiteRun, Step
from dsa_compile.verify.checks.variations import CAPTURED
from dsa_compile.verify.comparison.agreement import Agreement, compare
from dsa_compile.verify.comparison.delta import Delta, Pair, Side
from dsa_compile.verify.comparison.stage_calls import handed
from dsa_compile.verify.execution.handed_selections import comparable_value
from dsa_compile.verify.execution.interpreter import Values
from dsa_compile.verify.execution.stages import Stage, caches_for, result_nodes, weight_keys
from dsa_compile.verify.execution.traces import CallTrace, Trace
from dsa_compile.verify.inputs.prompt import Prompt


def whole_example(
    stages: tuple[Stage, Stage], traces: tuple[Trace, Trace], prompt: Prompt
) -> tuple[Delta, SiteRun] | None:
    """The step of a call in which two stages differ most, as a rewrite of that call's graph.

    Args:
        stages: before the rewrite and after it.
        traces: of both, watched, the second with ``given`` the first.
        prompt: what was traced.

    Returns:
        None if the two take the prompt in different steps, or return the same.
    """
    before, after = traces
    if before.chunks != after.chunks:
        return None
    best: tuple[float, int, int, dict[Pair, Agreement]] | None = None
    for index, calls in enumerate(zip(before.calls, after.calls, strict=True)):
        for number in range(len(before.chunks)):
            given = _handed_on(after, index, number, calls)
            found = _agreements(traces, index, given, number)
            error = max((a.error for a in found.values() if not a.bitwise), default=None)
            if error is not None and (best is None or error > best[0]):
                best = (error, index, number, found)
    if best is None:
        return None
    _, index, number, found = best
    regions = [trace.calls[index].regions[number] for trace in traces]
    delta = Delta(_all_of(regions[0]), _all_of(regions[1]), tuple(found))
    inputs = [
        _inputs(stage, trace, prompt, index, number)
        for stage, trace in zip(stages, traces, strict=True)
    ]
    calls = (before.calls[index], after.calls[index])
    inputs[1] |= {a: ours for (_, a), ours in _handed_on(after, index, number, calls).items()}
    values = [call.nodes[number] for call in calls]
    step = Step(number, (inputs[0], inputs[1]), (values[0], values[1]))
    return delta, SiteRun(CAPTURED, found, None, (step,))


def _handed_on(
    after: Trace, index: int, number: int, calls: tuple[CallTrace, CallTrace]
) -> dict[Pair, Tensor]:
    """Results of earlier calls in place of values that this call made before, by pair."""
    regions = [call.regions[number] for call in calls]
    names = {node.meta["key"]: node.name for node in regions[1].inputs_of(Role.VALUE)}
    return {
        (b, names[key]): after.calls[after.maker(index, number, key)].outputs[number][key]
        for b, key in handed(regions[0], regions[1])
    }


def _agreements(
    traces: tuple[Trace, Trace], index: int, given: dict[Pair, Tensor], number: int
) -> dict[Pair, Agreement]:
    before, after = traces
    calls, chunk = (before.calls[index], after.calls[index]), before.chunks[number]
    block_size = before.block_size
    old, new = (result_nodes(call.regions[number]) for call in calls)
    nodes, others = (call.nodes[number] for call in calls)
    pairs = {(old[k].name, new[k].name): others[new[k].name] for k in old if k in new} | given
    found = {}
    for (b, a), ours in pairs.items():
        sides = [
            comparable_value(call.regions[number], name, value, trace.batches[number], block_size)
            for call, trace, name, value in zip(
                calls, traces, (b, a), (nodes[b], ours), strict=True
            )
        ]
        found[b, a] = compare(sides[0], sides[1], chunk.size, chunk.padding)
    return found


def _all_of(region: Region) -> Side:
    calls = tuple(node for node in region.graph.nodes if node.op == "call_function")
    return Side(region, calls, tuple(region.inputs()))


def _inputs(stage: Stage, trace: Trace, prompt: Prompt, index: int, number: int) -> Values:
    """Inputs of a graph in one step, its caches as they were before."""
    done = trace.calls[index]
    caches: Values = {}
    for earlier in range(number + 1):
        region = done.regions[earlier]
        tables = {
            Role.VALUE: done.inputs[earlier],
            Role.BATCH: prompt.batch(trace.chunks[earlier], trace.flat),
            Role.CACHE: caches_for(region, prompt, caches, trace.exact),
            Role.WEIGHT: stage.weights.of(done.call, weight_keys(region)),
        }
        if earlier < number:
            stage.record(region, tables)
    return {n.name: tables[n.meta["role"]][n.meta["key"]] for n in region.inputs()}
