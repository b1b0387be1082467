"""Ops that a rewrite inserts: one of them may be wrong where the rewrite is right."""

from collections import Counter

from dsa_compile.ir.program import Program
from dsa_compile.ops import REFERENCE


def inserted_ops(before: Program, after: Program) -> str:
    """Ops that a program has more of than before, with the files that compute them.

    A file is named where it has other ops too: they share its code. The text is empty if there are
    none.
    """
    more = _ops(after) - _ops(before)
    return "inserts " + ", ".join(sorted(map(_described, more))) if more else ""


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
