"""Ops that a rewrite inserts and weights that it cuts: what is wrong may be one of these."""

from collections import Counter

from dsa_compile.ir.program import Program
from dsa_compile.ops import REFERENCE
from dsa_compile.weights.ranks import shards

_CUTTING = "weights/ranks.py, weights/windows.py"  # what makes a rank's part of a weight


def inserted_ops(before: Program, after: Program) -> str:
    """Ops that a program has more of than before and weights that it has a part of where it had the
    whole, with the files that compute them.

    A file is named where it has other ops too: they share its code. The text is empty if there are
    none.
    """
    more, cut = _ops(after) - _ops(before), _cut_weights(after) - _cut_weights(before)
    texts = ["inserts " + ", ".join(sorted(map(_described, more)))] if more else []
    texts += [f"cuts {', '.join(sorted(cut))} ({_CUTTING})"] if cut else []
    return "; ".join(texts)


def _cut_weights(program: Program) -> set[str]:
    plan = program.weights
    entries = (entry for kind in plan.kinds() for entry in plan.entries(kind).items())
    return {key for key, entry in entries if any(shards(entry.expr))}


def _ops(program: Program) -> Counter[object]:
    nodes = (node for region in program.regions.values() for node in region.graph.nodes)
    return Counter(node.target for node in nodes if node.target in REFERENCE)


def _described(op: object) -> str:
    module = REFERENCE[op].__module__  # type: ignore[index]
    name = _name(op)
    beside = sorted(
        _name(other) for other, function in REFERENCE.items()
        if function.__module__ == module and other is not op
    )  # fmt: skip
    file = module.partition(".")[2].replace(".", "/") + ".py"
    return f"dsa.{name} ({file}: {', '.join(beside)} too)" if beside else f"dsa.{name} ({file})"


def _name(op: object) -> str:
    return str(op).split(".")[1]
