"""Changes of one pass, rewrite by rewrite.

Nodes are matched by provenance: those that no rewrite removed or made are the same, whatever their
position. Nodes left over, because a pass works on the whole program and numbers no single
rewrites, are grouped by the edges between them.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dsa_compile.common.notebook import MOST_LINES, lines_html
from dsa_compile.inspect.pairing import Change, Pairing, pair_programs, pair_stages
from dsa_compile.inspect.store import Stage
from dsa_compile.ir.graph import Graph
from dsa_compile.ir.listing import Listing
from dsa_compile.ir.site import Site


@dataclass(frozen=True)
class Hunk:
    """One rewrite of one graph, or several that passed nodes on to one another.

    Attributes:
        region: the graph.
        path: the module of the reference model that the replaced nodes stand for.
        sites: numbers of its rewrites; empty where the pass numbers none here.
        removed: names of the nodes taken out, in the order of the graph before.
        made: names of the nodes put in, in the order of the graph after.
        changed: nodes that stay and take other inputs or constants because of it.
        passing: names of nodes that one rewrite made and another replaced.
    """

    region: str
    path: str
    sites: tuple[int, ...]
    removed: tuple[str, ...]
    made: tuple[str, ...]
    changed: tuple[Change, ...] = ()
    passing: tuple[str, ...] = ()


@dataclass(frozen=True)
class RegionDiff:
    """Changes of a pass to one region.

    Attributes:
        region: its name after the pass.
        pairing: the graph before and after.
        hunks: its rewrites, in order.
        retyped: nodes that stay as they are and yield another type.
    """

    region: str
    pairing: Pairing
    hunks: tuple[Hunk, ...]
    retyped: tuple[Change, ...]

    def __repr__(self) -> str:
        return f"<RegionDiff {self.region}: {len(self.hunks)} rewrites>"

    def _repr_html_(self) -> str:
        before, after = self.pairing.before, self.pairing.after
        return "".join(
            lines_html(
                f"{self.region} {hunk.path}",
                [
                    *_statements("-", before, hunk.removed),
                    *_statements("+", after, hunk.made),
                ],
            )
            for hunk in self.hunks[:MOST_LINES]
        )


def _statements(sign: str, graph: Graph | None, names: Sequence[str]) -> list[str]:
    if graph is None:
        return []
    listing = Listing(graph)
    # the entries of a result that are taken at once share a line
    lines = dict.fromkeys(str(listing.statement(graph.nodes[name])) for name in names)
    return [f"{sign} {line}" for line in lines]


def pass_diff(stage: Stage, only: Iterable[str] | None = None) -> list[RegionDiff]:
    """The regions that a pass changed.

    Args:
        stage: after the pass.
        only: names of the regions to look at; None for all.
    """
    wanted = stage.changed if only is None else [n for n in stage.changed if n in set(only)]
    return [region_diff(stage, name) for name in wanted]


def region_diff(stage: Stage, region: str) -> RegionDiff:
    """One region that a pass changed."""
    before, after = stage.ancestor(region), stage.changed[region]
    names = {region} if before is None else {region, before.name}
    sites = [site for site in stage.sites if site.region in names]
    removed = {name for site in sites for name in site.removed}
    made = {name for site in sites for name in site.made}
    pairing = pair_stages(before, after, removed, made)
    hunks = _numbered(region, sites, pairing)
    hunks = _with_leftovers(region, hunks, pairing)
    retyped = tuple(c for c in pairing.changes if not (c.rewired or c.constants))
    return RegionDiff(region, pairing, tuple(hunks), retyped)


def program_diff(before: Graph | None, after: Graph | None) -> RegionDiff:
    """One region of two programs, matched by structure alone; one of the two may lack it."""
    pairing = pair_programs(before, after)
    graph = after or before
    assert graph is not None
    hunks = _with_leftovers(graph.name, [], pairing)
    retyped = tuple(c for c in pairing.changes if not (c.rewired or c.constants))
    return RegionDiff(graph.name, pairing, tuple(hunks), retyped)


class _Groups:
    """Union-find over anything hashable."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def root(self, item: object) -> object:
        parent = self._parent.setdefault(item, item)
        while parent != self._parent[parent]:
            parent = self._parent[parent]
        self._parent[item] = parent
        return parent

    def join(self, first: object, second: object) -> None:
        self._parent[self.root(second)] = self.root(first)


def _numbered(region: str, sites: Sequence[Site], pairing: Pairing) -> list[Hunk]:
    """A hunk for each rewrite; those are one that hand on a node that is in neither graph."""
    removed, made = set(pairing.removed), set(pairing.made)
    groups = _Groups()
    maker: dict[str, int] = {}
    passing = defaultdict(list)
    for site in sites:
        for name in site.removed:
            if name in maker and name not in removed:
                groups.join(maker[name], site.number)
                passing[name].append(site.number)
        maker.update(dict.fromkeys(site.made, site.number))
    members = defaultdict(list)
    for site in sites:
        members[groups.root(site.number)].append(site)
    hunks = []
    for group in members.values():
        gone = {name for site in group for name in site.removed} & removed
        new = {name for site in group for name in site.made} & made
        numbers = tuple(site.number for site in group)
        between = tuple(name for name, users in passing.items() if set(users) & set(numbers))
        hunks.append(
            Hunk(
                region,
                next((site.path for site in group if site.path), ""),
                numbers,
                tuple(name for name in pairing.removed if name in gone),
                tuple(name for name in pairing.made if name in new),
                passing=between,
            )
        )
    return hunks


def _with_leftovers(region: str, hunks: list[Hunk], pairing: Pairing) -> list[Hunk]:
    """Hunks with inputs and dead nodes that go with them, and one more for each group left over."""
    owner: dict[tuple[str, str], int] = {}  # ("-" or "+", name) → hunk
    for index, hunk in enumerate(hunks):
        owner |= {("-", name): index for name in hunk.removed}
        owner |= {("+", name): index for name in hunk.made}
    edges = list(_edges(pairing))
    for first, second in edges + edges[::-1]:
        for one, other in ((first, second), (second, first)):
            if one in owner and other not in owner and _goes_along(other, pairing):
                owner[other] = owner[one]
    groups = _Groups()
    rest = [("-", n) for n in pairing.removed] + [("+", n) for n in pairing.made]
    rest = [item for item in rest if item not in owner]
    for first, second in edges:
        if first not in owner and second not in owner:
            groups.join(first, second)
    numbers: dict[object, int] = {}
    for item in rest:
        root = groups.root(item)
        if root not in numbers:
            numbers[root] = len(hunks)
            hunks.append(Hunk(region, "", (), (), ()))
        owner[item] = numbers[root]
    changed = _owned_changes(region, hunks, owner, pairing)
    return [
        _filled(hunk, index, owner, changed[index], pairing) for index, hunk in enumerate(hunks)
    ]


def _edges(pairing: Pairing) -> Iterable[tuple[tuple[str, str], tuple[str, str]]]:
    """Edges between nodes without a partner: uses, and one put in the place of another."""
    for sign, graph, names in (
        ("-", pairing.before, set(pairing.removed)),
        ("+", pairing.after, set(pairing.made)),
    ):
        for name in graph.nodes if graph is not None else ():
            if name in names:
                for source in graph.nodes[name].inputs:  # type: ignore[union-attr]
                    if source in names:
                        yield (sign, name), (sign, source)
    for change in pairing.changes:
        for old, new in change.rewired:
            if old in pairing.removed and new in pairing.made:
                yield ("-", old), ("+", new)


def _goes_along(item: tuple[str, str], pairing: Pairing) -> bool:
    """Whether a node without a rewrite of its own is part of the one beside it."""
    sign, name = item
    graph = pairing.before if sign == "-" else pairing.after
    assert graph is not None
    return sign == "-" or graph.nodes[name].op == "placeholder"


def _owned_changes(
    region: str, hunks: list[Hunk], owner: dict[tuple[str, str], int], pairing: Pairing
) -> dict[int, list[Change]]:
    found = defaultdict(list)
    for change in pairing.changes:
        if not (change.rewired or change.constants):
            continue
        owners = [owner.get(("+", new), owner.get(("-", old))) for old, new in change.rewired]
        index = next((each for each in owners if each is not None), None)
        if index is None:
            index = len(hunks)
            hunks.append(Hunk(region, "", (), (), ()))
        found[index].append(change)
    return found


def _filled(
    hunk: Hunk,
    index: int,
    owner: dict[tuple[str, str], int],
    changed: Sequence[Change],
    pairing: Pairing,
) -> Hunk:
    removed = tuple(name for name in pairing.removed if owner[("-", name)] == index)
    made = tuple(name for name in pairing.made if owner[("+", name)] == index)
    path = hunk.path or _path(pairing.before, removed) or _path(pairing.after, made)
    path = path or _path(pairing.after, [change.after for change in changed])
    return replace(hunk, path=path, removed=removed, made=made, changed=tuple(changed))


def _path(graph: Graph | None, names: Iterable[str]) -> str:
    if graph is None:
        return ""
    return next((path for name in names if (path := graph.nodes[name].path)), "")
