"""Ops that a rewrite inserts or calls differently, and weights that it cuts: the fault may be one
of these."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import fx

from dsa_compile.ir.program import Program
from dsa_compile.ops import REFERENCE
from dsa_compile.weights.ranks import shards

_CUTTING = "weights/ranks.py, weights/windows.py"  # what makes a rank's part of a weight


def inserted_ops(before: Program, after: Program) -> str:
    """Ops that a program has more of than before, ops that it calls with other constants and
    weights that it has a part of where it had the whole, with the files that compute them.

    A file is named where it has other ops too: they share its code. The text is empty if there are
    none.
    """
    more, cut = _ops(after) - _ops(before), _cut_weights(after) - _cut_weights(before)
    other = {op for op, _ in _with_constants(after) - _with_constants(before)} - more.keys()
    texts = [f"inserts {_listed(more)}"] if more else []
    texts += [f"calls {_listed(other)} with other arguments"] if other else []
    texts += [f"cuts {', '.join(sorted(cut))} ({_CUTTING})"] if cut else []
    return "; ".join(texts)


def _cut_weights(program: Program) -> set[str]:
    plan = program.weights
    entries = (entry for kind in plan.kinds() for entry in plan.entries(kind).items())
    return {key for key, entry in entries if any(shards(entry.expr))}


def _calls(program: Program) -> Iterator[fx.Node]:
    nodes = (node for region in program.regions.values() for node in region.graph.nodes)
    return (node for node in nodes if node.target in REFERENCE)


def _ops(program: Program) -> Counter[object]:
    return Counter(node.target for node in _calls(program))


def _with_constants(program: Program) -> Counter[tuple[object, str]]:
    """Ops with the arguments that no node makes: an op may take another way by these."""
    return Counter((node.target, _constants(node)) for node in _calls(program))


def _constants(node: fx.Node) -> str:
    return str(fx.map_arg((node.args, node.kwargs), lambda _: ...))  # type: ignore[arg-type,return-value]


def _listed(ops: Iterable[object]) -> str:
    return ", ".join(sorted(map(_described, ops)))


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
