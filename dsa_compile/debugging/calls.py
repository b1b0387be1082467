"""Two stages compared call by call, each call of the second given the inputs of the first."""

import torch
from torch import Tensor

from dsa_compile.debugging.agreement import Agreement, compare
from dsa_compile.debugging.delta import find_delta
from dsa_compile.debugging.stages import CallTrace, Trace
from dsa_compile.ir.region import Region, Role

# Of all pairs of tokens, which only dense stages have.
_QUADRATIC = frozenset({"causal_mask"})


def compare_calls(before: Trace, after: Trace) -> list[Agreement]:
    """How what each call returns agrees with what it returned before.

    What only the second stage hands from call to call is compared with what the next call of the
    first made itself, and counts for the call that returned it: the norm that a layer hands to the
    next one, say.

    Args:
        before: watched.
        after: run with ``given=before``.
    """
    tokens = before.chunks[-1].stop
    found = [Agreement() for _ in before.calls]
    for index, (old, new) in enumerate(zip(before.calls, after.calls, strict=True)):
        for key in sorted(_always(old) & _always(new) - _QUADRATIC):
            theirs, ours = before.result(index, key), after.result(index, key)
            found[index] = found[index].and_(compare(theirs, ours, tokens))
        if before.chunks != after.chunks or before.flat != after.flat:
            continue
        parts: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
        for number in range(len(before.chunks)):
            for name, key in _handed(old.regions[number], new.regions[number]):
                pair = old.nodes[number][name], new.inputs[number][key]
                parts.setdefault((_maker(after, index, number, key), key), []).append(pair)
        for (maker, _), pairs in parts.items():
            theirs, ours = (torch.cat(side) for side in zip(*pairs, strict=True))
            found[maker] = found[maker].and_(compare(theirs, ours, len(theirs)))
    return found


def _handed(before: Region, after: Region) -> list[tuple[str, str]]:
    """Calls of a region in whose place another has an input value, by name and by key."""
    delta = find_delta(before, after) if before is not after else None
    if delta is None:
        return []
    made = {node.name for node in delta.before.nodes}
    keys = {node.name: node.meta["key"] for node in after.inputs_of(Role.VALUE)}
    return [(b, keys[a]) for b, a in delta.pairs if b in made and a in keys]


def _maker(trace: Trace, index: int, number: int, key: str) -> int:
    """The last call before ``index`` that returned a value."""
    return max(i for i in range(index) if key in trace.calls[i].outputs[number])


def _always(call: CallTrace) -> set[str]:
    """What a call returns in every step."""
    return set.intersection(*(set(outputs) for outputs in call.outputs))
