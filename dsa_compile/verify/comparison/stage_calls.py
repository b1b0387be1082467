"""Two stages compared call by call, each call of the second given the inputs of the first."""

import operator
from typing import Any

import torch

from dsa_compile.ir.region import Region, Role
from dsa_compile.verify.comparison.agreement import Agreement, compare
from dsa_compile.verify.comparison.delta import find_delta
from dsa_compile.verify.execution.handed_selections import SELECTED
from dsa_compile.verify.execution.ranks import on_ranks, parts_of
from dsa_compile.verify.execution.stages import Stage, run_stage
from dsa_compile.verify.execution.traces import IN_STEP, CallTrace, Trace
from dsa_compile.verify.inputs.prompt import Prompt


def run_against(stage: Stage, prompt: Prompt, before: Trace) -> Trace:
    """Run a stage whose calls are given what those of an earlier stage were given.

    That includes what only the second stage hands from call to call: each call is given what the
    same call of the first made itself. The trace is watched.

    Args:
        stage: what to run.
        prompt: the sequence.
        before: of the earlier stage, watched.
    """
    return run_stage(stage, prompt, given=before, handed=handed, watch=True)


def compare_calls(before: Trace, after: Trace) -> list[Agreement]:
    """Agreement of each call's results with those that it returned before.

    Values that only the second stage hands from call to call are compared with those that the next
    call of the first made itself, and count for the call that returned them: the norm that a layer
    hands to the next one, say.

    Args:
        before: watched.
        after: see :func:`run_against`.
    """
    tokens = sum(map(len, before.places))
    found = [Agreement() for _ in before.calls]
    for index, (old, new) in enumerate(zip(before.calls, after.calls, strict=True)):
        both = _always(old) & _always(new)
        if SELECTED in both:
            theirs, ours = before.selected(index), after.selected(index)
            found[index] = found[index].and_(compare(theirs, ours, tokens))
        for key in sorted(both - IN_STEP):
            theirs, ours = before.result(index, key), after.result(index, key)
            found[index] = found[index].and_(compare(theirs, ours, tokens))
        if not (before.alike(after) and before.watched):
            continue
        parts: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
        for number in range(len(before.chunks)):
            for name, key in handed(old.regions[number], new.regions[number]):
                made_by = after.maker(index, number, key)
                kept = before.chunks[number].tokens
                theirs, ours = (old.nodes[number][name], after.calls[made_by].outputs[number][key])
                own = on_ranks(operator.getitem)
                pair = own(theirs, slice(kept)), own(ours, slice(kept))
                parts.setdefault((made_by, key), []).append(pair)
        for (made_by, _), pairs in parts.items():
            theirs, ours = (on_ranks(torch.cat)(side) for side in zip(*pairs, strict=True))
            rows = len(parts_of(theirs)[0])
            found[made_by] = found[made_by].and_(compare(theirs, ours, rows))
    return found


def handed(before: Region, after: Region) -> list[tuple[str, str]]:
    """See :data:`~dsa_compile.verify.execution.stages.Handed`."""
    known, keys = (
        {node.meta["key"]: node.name for node in region.inputs_of(Role.VALUE)}
        for region in (before, after)
    )
    if keys.keys() <= known.keys():
        return []
    delta = find_delta(before, after)
    if delta is None:
        return []
    made = {node.name for node in delta.before.nodes}
    names = {name: key for key, name in keys.items()}
    return [(b, names[a]) for b, a in delta.pairs if b in made and a in names]


def _always(call: CallTrace) -> set[str]:
    """Names of the results that a call returns in every step."""
    return set.intersection(*(set(outputs) for outputs in call.outputs))
