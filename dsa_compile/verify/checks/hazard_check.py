"""Violations in a finished program, hazards above all, and the pass that left each."""

from collections.abc import Iterator

from dsa_compile.ir.dims import shape_names
from dsa_compile.ir.hazards import find_hazards
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.region import Role
from dsa_compile.ir.spec import violations
from dsa_compile.verify.checks.report import HazardReport
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.checks.stream_check import stream_problem
from dsa_compile.verify.execution.replay import Replay

STREAMS = "streams"
"""The name of what runs side streams, where it and no pass is wrong."""

_Problems = dict[str, tuple[str, ...]]
"""Sentences, each with the two calls that it is about or none."""


def illegal(replay: Replay) -> Iterator[HazardReport]:
    """Violations in the finished program, each with the pass that first left it."""
    if not any(region.inputs_of(Role.CACHE) for region in replay.final.regions.values()):
        return  # it was stopped long before the level that this is about
    if replay.final.config.stop_after not in (None, replay.runs[-1].step.name):
        return
    found = _problems(replay.final)
    first = dict.fromkeys(found, 0)
    left = set(found)
    for index in range(len(replay.runs) - 1, 0, -1):
        if not left:
            break
        earlier = _problems(replay.runs[index].before).keys()
        first.update(dict.fromkeys(left - earlier, index))
        left &= earlier
    for problem, nodes in found.items():
        run = replay.runs[first[problem]]
        region = problem.partition(":")[0]
        site = next((s.number for s in run.sites if s.region == region), None)
        yield HazardReport(run.step.name, site, nodes, problem)
    if not found:
        yield from _of_the_runtime(replay.final)


def _problems(program: Program) -> _Problems:
    known: _Problems = {
        str(hazard): (hazard.first, hazard.second)
        for region in program.regions.values()
        for hazard in find_hazards(region)
    }
    found = {text: known.get(text, ()) for text in violations(program, Level.KERNEL)}
    return found | dict.fromkeys(_unselected(program), ())


def _unselected(program: Program) -> Iterator[str]:
    """Results of rows that a graph was asked to select and has not; verify compares the others."""
    for region in program.regions.values():
        if any(node.meta["key"] == "logit_rows" for node in region.inputs_of(Role.BATCH)):
            for name in region.outputs:
                sizes = shape_names(region.result(name).meta["val"])
                if sizes[0] != "N":
                    yield f"{region.name}: {name} are of {sizes[0]} rows, not of the N wanted"


def _of_the_runtime(program: Program) -> Iterator[HazardReport]:
    """What the runtime makes of the stream ops of right graphs, where that is something else."""
    for region in program.regions.values():
        try:
            problem = stream_problem(region)
        except Exception as error:  # whatever a wrong switch of streams raises
            problem = f"{region.name}: does not run on streams: {in_a_line(error)}"
        if problem:
            text = f"{problem} (as runtime/execution/streams.py runs it; the graph is right)"
            yield HazardReport(STREAMS, None, (), text)
