"""The legal form of a program at each level, as data, checked at every boundary."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from dsa_compile.errors import CompileError
from dsa_compile.ir.dims import shape_names, symbol_names
from dsa_compile.ir.hazards import find_hazards
from dsa_compile.ir.kernel_ops import allowed_targets
from dsa_compile.ir.placement_check import placement_problems
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.refusal import made_by, node_problem
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import describe
from dsa_compile.ops import FACTS, Form

aten = torch.ops.aten

# Ops on dense batches, with state nowhere, are gone by the KERNEL level; those that need flat
# tokens, caches or a recipe come with it.
_DENSE_ONLY = frozenset(op for op, facts in FACTS.items() if facts.form is Form.DENSE)
_KERNEL_ONLY = frozenset(op for op, facts in FACTS.items() if facts.form is Form.FLAT)
# What moves data without computing, with symbolic sizes; gone by the KERNEL level too.
_SYMBOLIC = frozenset({aten.sym_size.int})


@dataclass(frozen=True)
class Legal:
    """Ops, symbols and roles that may stand in a graph of one level."""

    targets: frozenset[object]
    token_symbols: frozenset[str]  # at most one dimension of a value may grow with these
    roles: frozenset[Role]


def _legal() -> dict[Level, Legal]:
    common = frozenset(allowed_targets().values())
    every = frozenset(Role)
    return {
        Level.LOGICAL: Legal(
            (common | _SYMBOLIC) - _KERNEL_ONLY, frozenset({"S"}), every - {Role.CACHE}
        ),
        Level.KERNEL: Legal(common - _DENSE_ONLY, frozenset({"T", "S", "B"}), every),
    }


def violations(program: Program, level: Level) -> Iterator[str]:
    """Violations of a program's level, one sentence each, found lazily."""
    legal = _legal().get(level)
    if legal is None:
        return  # whatever export gives is legal there
    for region in program.regions.values():
        for node in region.graph.nodes:
            reason = _node_problem(node, legal)
            if reason:
                where = node.meta.get("path") or "top"
                yield f"{region.name}: {where}: node {node.name} {reason}{made_by(node)}"
        yield from _weight_problems(program, region)
        if level is Level.KERNEL:
            yield from map(str, find_hazards(region))
    yield from _value_problems(program)
    if level is Level.KERNEL and program.config.layout.world > 1:
        yield from placement_problems(program)


def verify(program: Program, level: Level) -> None:
    """Raise CompileError naming the first violation of ``level``."""
    for problem in violations(program, level):
        raise CompileError(f"not a legal {level.name} program: {problem}")


def _node_problem(node: fx.Node, legal: Legal) -> str | None:
    if node.op == "output":
        return None
    if node.op == "placeholder":
        role = node.meta.get("role")
        return None if role in legal.roles else f"has role {role}"
    if node.op != "call_function":
        return f"is a {node.op}"
    if node.target not in legal.targets:
        return f"calls {node.target}"
    value = node.meta["val"]
    for item in value if isinstance(value, tuple | list) else (value,):
        if not isinstance(item, torch.Tensor):
            continue
        growing = [s for s in item.shape if symbol_names(s) & legal.token_symbols]
        if len(growing) > 1:
            return f"is quadratic in tokens: {describe(item)!r}"
        if any(symbol_names(s) - _KNOWN for s in item.shape):
            return f"has a size that depends on data: {', '.join(shape_names(item))}"
    return node_problem(node)


_KNOWN = frozenset({"B", "S", "T", "R", "R+1", "M", "N", "P"})


def _weight_problems(program: Program, region: Region) -> Iterator[str]:
    entries = program.weights.entries(region.kind)
    for node in region.inputs_of(Role.WEIGHT):
        key, value = node.meta["key"], node.meta["val"]
        entry = entries.get(key)
        if entry is None:
            yield f"{region.name}: weight {key} is not in the weight plan"
        elif (entry.torch_dtype, entry.shape) != (value.dtype, tuple(value.shape)):
            yield f"{region.name}: weight {key} is {describe(value)!r} but planned as {entry}"


def _value_problems(program: Program) -> Iterator[str]:
    """Values must be produced before they are read, in every variant."""
    for variant in program.variants or (None,):
        known: set[str] = set()
        for kind in program.order:
            region = program.region(kind, variant)
            for node in region.inputs_of(Role.VALUE):
                if node.meta["key"] not in known:
                    yield f"{region.name}: reads {node.meta['key']}, which nothing has made"
            known |= set(region.outputs)
