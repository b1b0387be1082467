"""Equal rewrites shown once: over the modules of a layer, over kinds of layers, over all layers.

Two rewrites are equal if their statements are, once every name is replaced by the order in which it
occurs and types are left out. Where the layers of a model differ in what a pass did to the same
module, the minority is an outlier.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsa_compile.common.notebook import lines_html
from dsa_compile.inspect.diff import Hunk, RegionDiff
from dsa_compile.inspect.pairing import Change, Pairing
from dsa_compile.inspect.store import Stage, Store, ranges
from dsa_compile.ir.graph import Graph
from dsa_compile.ir.listing import Listing, Statement


@dataclass(frozen=True)
class Place:
    """Place where a rewrite was made.

    Attributes:
        region: the graph.
        path: the module.
        sites: numbers of the rewrites.
        layers: the numbers of the layers that run the graph; none for ``embed`` and ``head``.
    """

    region: str
    path: str
    sites: tuple[int, ...]
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """A node that stays, with other inputs or constants.

    Attributes:
        statement: its line afterwards.
        was: its line before.
        rewired: inputs it took, and those it takes in their place.
        constants: whether an argument that is no node changed.
    """

    statement: Statement
    was: Statement
    rewired: tuple[tuple[str, str], ...]
    constants: bool


@dataclass(frozen=True)
class Fold:
    """Equal rewrites.

    Attributes:
        places: all of them.
        removed: statements taken out, of the first place.
        made: statements put in, of the first place.
        kept: statements that stay, with other inputs or constants.
        passing: how many nodes one rewrite handed to another.
    """

    places: tuple[Place, ...]
    removed: tuple[Statement, ...]
    made: tuple[Statement, ...]
    kept: tuple[Kept, ...]
    passing: int

    def __repr__(self) -> str:
        paths = ", ".join(dict.fromkeys(place.path for place in self.places if place.path))
        return f"<Fold {self.rewrites} rewrites: {paths}>"

    def _repr_html_(self) -> str:
        lines = [f"- {line}" for line in self.removed] + [f"+ {line}" for line in self.made]
        return lines_html(repr(self).strip("<>"), lines)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of all places."""
        return tuple(sorted({layer for place in self.places for layer in place.layers}))

    @property
    def rewrites(self) -> int:
        """Number of the numbered rewrites over all layers."""
        return sum(len(place.sites) * (len(place.layers) or 1) for place in self.places)


@dataclass(frozen=True)
class Outlier:
    """Layers in which a pass did something else to a module than in most.

    Attributes:
        path: the module.
        layers: those layers.
        others: the layers that agree.
        text: what differs.
    """

    path: str
    layers: tuple[int, ...]
    others: tuple[int, ...]
    text: str


def fold(store: Store, diffs: Sequence[RegionDiff]) -> list[Fold]:
    """The rewrites of some regions, equal ones together, in the order of the first."""
    groups: dict[str, list[tuple[RegionDiff, Hunk]]] = defaultdict(list)
    for diff in diffs:
        for hunk in diff.hunks:
            groups[canonical(hunk, diff.pairing)].append((diff, hunk))
    return [_fold(store, members) for members in groups.values()]


def canonical(hunk: Hunk, pairing: Pairing) -> str:
    """A text that is the same for equal rewrites."""
    names = _Names(pairing)
    removed = names.statements(pairing.before, hunk.removed)
    made = names.statements(pairing.after, hunk.made)
    constants = [
        (
            names.statements(pairing.before, [change.before]),
            names.statements(pairing.after, [change.after]),
        )
        for change in hunk.changed
        if change.constants and pairing.before is not None
    ]
    if not (removed or made or constants):
        removed = [str(sorted(_rewired_ops(hunk, pairing)))]
    return json.dumps([removed, made, constants, len(hunk.sites), len(hunk.passing)])


def _rewired_ops(hunk: Hunk, pairing: Pairing) -> Iterable[str]:
    for change in hunk.changed:
        assert pairing.after is not None
        yield pairing.after.nodes[change.after].target


class _Names:
    """Replaces names by the order in which they occur; paired nodes share one."""

    def __init__(self, pairing: Pairing) -> None:
        self._back = {new: old for old, new in pairing.pairs.items()}
        self._order: dict[tuple[str, str], str] = {}
        self._after = pairing.after

    def statements(self, graph: Graph | None, names: Iterable[str]) -> list[str]:
        """The statements of some nodes of one of the two graphs."""
        if graph is None:
            return []
        found = []
        for name in names:
            node = graph.nodes[name]
            if node.op == "output":
                found.append("output")
                continue
            given = {each: self._name(graph, each) for each in (*node.inputs, name)}
            text = Listing(graph, given).expression(node) if node.is_call else node.role
            found.append(f"{given[name]} = {text}")
        return found

    def _name(self, graph: Graph, name: str) -> str:
        if graph is self._after:
            key = ("before", self._back[name]) if name in self._back else ("after", name)
        else:
            key = ("before", name)
        return self._order.setdefault(key, f"n{len(self._order)}")


def _fold(store: Store, members: Sequence[tuple[RegionDiff, Hunk]]) -> Fold:
    diff, hunk = members[0]
    pairing = diff.pairing
    return Fold(
        tuple(
            Place(hunk.region, hunk.path, hunk.sites, store.layers_of(hunk.region))
            for _, hunk in members
        ),
        _statements(pairing.before, hunk.removed),
        _statements(pairing.after, hunk.made),
        tuple(_kept(pairing, change) for change in hunk.changed),
        len(hunk.passing),
    )


def _kept(pairing: Pairing, change: Change) -> Kept:
    (now,) = _statements(pairing.after, [change.after])
    (was,) = _statements(pairing.before, [change.before])
    return Kept(now, was, change.rewired, change.constants)


def _statements(graph: Graph | None, names: Sequence[str]) -> tuple[Statement, ...]:
    """The lines of some nodes, equal ones once."""
    if graph is None:
        return ()
    listing = Listing(graph)
    lines: dict[str, Statement] = {}
    for name in names:
        node = graph.nodes[name]
        if node.is_call:
            statement = listing.statement(node)
        elif node.op == "placeholder":
            statement = Statement((name,), f"{name},", node.type_text, f"{node.role} {node.key}")
        else:
            results = ", ".join(graph.results)
            statement = Statement((name,), f"return {results}", "", ", ".join(graph.outputs))
        lines[statement.code] = statement
    return tuple(lines.values())


def outliers(store: Store, stage: Stage, diffs: Sequence[RegionDiff]) -> list[Outlier]:
    """Modules that a pass rewrote differently, or not at all, in a minority of the layers.

    Args:
        store: the artifact.
        stage: after the pass.
        diffs: of all regions that it changed.
    """
    forms: dict[tuple[str, str], dict[str, Counter[str]]] = defaultdict(
        lambda: defaultdict(Counter)
    )
    for diff in diffs:
        for hunk in diff.hunks:
            if hunk.path and store.layers_of(diff.region):
                place = hunk.path, diff.region.partition(".")[2]
                forms[place][diff.region][canonical(hunk, diff.pairing)] += 1
    found = []
    for (path, variant), by_region in forms.items():
        # modules of one name that compute something else, as an MLP and an MoE, are no rivals
        modules: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for region in _layer_regions(store, stage, variant):
            form = json.dumps(sorted(by_region[region].items()) if region in by_region else [])
            modules[_module(stage, region, path)][form] += store.layers_of(region)
        for rivals in modules.values():
            found += _minority(path, rivals)
    return found


def _layer_regions(store: Store, stage: Stage, variant: str) -> list[str]:
    return [
        name
        for name, graph in stage.graphs.items()
        if store.layers_of(graph.kind) and graph.variant == variant
    ]


def _module(stage: Stage, region: str, path: str) -> str:
    """Ops that a module computes before a pass, each as often as it occurs."""
    graph = stage.ancestor(region)
    calls = () if graph is None else graph.calls
    return json.dumps(sorted(node.target for node in calls if node.path == path))


def _minority(path: str, rivals: Mapping[str, list[int]]) -> list[Outlier]:
    if len(rivals) < 2:
        return []
    ranked = sorted(rivals.items(), key=lambda item: -len(item[1]))
    others = tuple(sorted(ranked[0][1]))
    found = []
    for form, layers in ranked[1:]:
        count, usual = (sum(n for _, n in json.loads(f)) for f in (form, ranked[0][0]))
        if not count:
            text = f"not rewritten, as it is in layers {ranges(others)}"
        elif count != usual:
            text = f"{count} rewrites, {usual} in layers {ranges(others)}"
        else:
            text = f"rewritten otherwise than in layers {ranges(others)}"
        found.append(Outlier(path, tuple(sorted(layers)), others, text))
    return found
