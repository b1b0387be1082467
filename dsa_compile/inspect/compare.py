"""Comparison of two artifacts: options, passes, kernels, weights, graphs."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsa_compile.inspect.diff import RegionDiff, program_diff
from dsa_compile.inspect.fold import Fold, fold
from dsa_compile.inspect.pairing import pair_programs
from dsa_compile.inspect.store import Store
from dsa_compile.inspect.weights import weight_texts
from dsa_compile.ir.graph import Graph
from dsa_compile.ir.plan import PROMPTS, region_name


@dataclass(frozen=True)
class Difference:
    """One thing that differs; a side that lacks it has None.

    Attributes:
        what: ``option``, ``pass``, ``kernel``, ``cache``, ``layer``, ``weight``, ``versions``.
        name: of the thing.
        first: in the first artifact, to read.
        second: in the second.
        layers: the layers concerned, if it is a matter of layers.
    """

    what: str
    name: str
    first: str | None
    second: str | None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Parting:
    """The first pass after which two programs differ.

    Attributes:
        number: of the pass in the first artifact; 0 if they differ as exported.
        name: of the pass, or ``export``.
        regions: that differ there.
    """

    number: int
    name: str
    regions: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Differences between two artifacts.

    Attributes:
        facts: everything but the graphs.
        regions: the pairs of regions compared, each with its differences.
        rewrites: the differences of graphs, equal ones folded.
        parting: where the graphs part, of the passes that both ran; None if they do not, or without
            records.
    """

    facts: tuple[Difference, ...]
    regions: tuple[RegionDiff, ...]
    rewrites: tuple[Fold, ...]
    parting: Parting | None

    @property
    def same(self) -> bool:
        """Whether both compute the same from the same weights in the same way."""
        return not (self.facts or self.rewrites or any(diff.retyped for diff in self.regions))


def compare(first: Store, second: Store) -> Comparison:
    """Compare two artifacts, of one model or of several.

    Raises:
        ArtifactError: a file of either is damaged.
    """
    facts = [
        *_tables("versions", *(asdict(s.manifest.producer) for s in (first, second))),
        *_tables("option", *(_options(s) for s in (first, second))),
        *_tables("model", *(asdict(s.manifest.model.spec) for s in (first, second))),
        *_tables("pass", *(_passes(s) for s in (first, second))),
        *_tables("kernel", *(_kernels(s) for s in (first, second))),
        *_tables("cache", *(_caches(s) for s in (first, second))),
        *_layers(first, second),
        *_tables("weight", *(_weights(s) for s in (first, second))),
    ]
    regions = tuple(program_diff(*pair) for pair in _pairs(first, second))
    wider = first if len(first.layers) >= len(second.layers) else second
    rewrites = tuple(fold(wider, regions))
    return Comparison(tuple(facts), regions, rewrites, _parting(first, second))


def _parting(first: Store, second: Store) -> Parting | None:
    if not (first.has_records and second.has_records):
        return None
    others = {stage.name: stage for stage in second.stages}
    for stage in first.stages:
        other = others.get(stage.name)
        if other is None:
            continue
        apart = tuple(
            name
            for name in dict.fromkeys((*stage.graphs, *other.graphs))
            if _differ(stage.graphs.get(name), other.graphs.get(name))
        )
        if apart:
            return Parting(stage.number, stage.name, apart)
    return None


def _differ(first: Graph | None, second: Graph | None) -> bool:
    if first is None or second is None:
        return True
    if first == second:
        return False
    pairing = pair_programs(first, second)
    return bool(pairing.removed or pairing.made or pairing.changes)


def _tables(what: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterable[Difference]:
    for name in dict.fromkeys((*first, *second)):
        a, b = first.get(name), second.get(name)
        if a != b or (name in first) != (name in second):
            yield Difference(
                what,
                name,
                str(a) if name in first else None,
                str(b) if name in second else None,
            )


def _options(store: Store) -> dict[str, Any]:
    options = asdict(store.manifest.compile)
    return {name: _short(value) for name, value in options.items()}


def _short(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _passes(store: Store) -> dict[str, str]:
    """The passes that ran, in order; how long they took is not compared."""
    return {
        summary.name: f"{summary.rewrites} rewrites, {summary.nodes_after} nodes after"
        for summary in store.manifest.passes
    }


def _kernels(store: Store) -> dict[str, str]:
    return {
        op: ", ".join(
            kernel.provider + ("" if kernel.max_tokens is None else f" up to {kernel.max_tokens}")
            for kernel in kernels
        )
        for op, kernels in store.manifest.kernels.items()
    }


def _caches(store: Store) -> dict[str, str]:
    return {
        f"{kind}.{cache.key}": f"{cache.width} × {cache.dtype}"
        for kind, caches in store.manifest.caches.items()
        for cache in caches
    }


def _layers(first: Store, second: Store) -> Iterable[Difference]:
    """Layers that only one has, or that run another region or take other weights."""
    tables = [
        {layer.index: {"kind": layer.kind, **layer.vars} for layer in store.layers}
        for store in (first, second)
    ]
    found: dict[tuple[str, str | None, str | None], list[int]] = {}
    for index in sorted({*tables[0], *tables[1]}):
        sides = [table.get(index) for table in tables]
        if sides[0] is None or sides[1] is None:
            kinds = [None if side is None else side["kind"] for side in sides]
            found.setdefault(("", *kinds), []).append(index)  # type: ignore[arg-type]
            continue
        for name in dict.fromkeys((*sides[0], *sides[1])):
            a, b = sides[0].get(name), sides[1].get(name)
            if a != b:
                found.setdefault((name, a, b), []).append(index)
    for (name, a, b), layers in found.items():
        yield Difference("layer", name, a, b, tuple(layers))


def _weights(store: Store) -> dict[str, str]:
    return {f"{kind}: {key}": text for (kind, key), text in weight_texts(store).items()}


def _partner(name: str, other: Container[str]) -> str | None:
    kind, _, variant = name.partition(".")
    found = region_name(other, kind, variant or None)
    if found not in other or (variant in PROMPTS and found == kind):
        return None
    return found


def _pairs(first: Store, second: Store) -> list[tuple[Graph | None, Graph | None]]:
    """Regions of the same name; one that is not split goes with the long and the short one of the
    other, and those of a program without variants of prompts with the other's as well."""
    graphs = first.final, second.final
    found: dict[tuple[str | None, str | None], None] = {}
    for side, other in (graphs, graphs[::-1]):
        for name in side:
            kind = name.partition(".")[0]
            partner = _partner(name, other)
            variants = [each for each in other if each.partition(".")[0] == kind]
            if partner is None and variants:
                continue  # variants of the other side look for it; those of prompts go with none
            pair = (name, partner) if side is graphs[0] else (partner, name)
            found[pair] = None
    return [
        (None if a is None else graphs[0][a], None if b is None else graphs[1][b]) for a, b in found
    ]
