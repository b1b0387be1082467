"""History of a node: the rewrites that led to it, back to the exported graph.

A node made by a rewrite stands for nodes that the rewrite removed; those were made by earlier
rewrites or are as exported, with a line of the reference model. Names mean a node only together
with a stage: a name that was freed may be taken again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dsa_compile.errors import UserError
from dsa_compile.inspect.diff import Hunk, region_diff
from dsa_compile.inspect.lineage import lineage
from dsa_compile.inspect.store import Stage, Store, unknown
from dsa_compile.ir.graph import Graph, Node


@dataclass(frozen=True)
class Step:
    """One rewrite in the history of a node.

    Attributes:
        stage: number of the pass.
        name: of the pass.
        region: the graph, as it is called after the pass.
        sites: numbers of the rewrites; empty for a pass that numbers none here.
        path: the module of the reference model.
        made: names of the nodes put in.
        removed: names of the nodes taken out.
        passing: names of nodes that came and went between its rewrites.
    """

    stage: int
    name: str
    region: str
    sites: tuple[int, ...]
    path: str
    made: tuple[str, ...]
    removed: tuple[str, ...]
    passing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ancestor:
    """A node in the history of another.

    Attributes:
        node: as it was when it was made.
        graph: that it was in.
        made_by: the rewrite that made it; None if it is as exported.
        sources: the nodes of the graph before that it stands for; none if it was introduced.
    """

    node: Node
    graph: Graph
    made_by: Step | None
    sources: tuple["Ancestor", ...] = field(default=(), repr=False)

    def walk(self) -> Iterator["Ancestor"]:
        """Walk this node and all its ancestors, each once, nearest first."""
        seen: set[int] = set()
        todo = [self]
        while todo:
            each = todo.pop(0)
            if id(each) not in seen:
                seen.add(id(each))
                yield each
                todo += each.sources

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Rewrites in the history of the node, the latest pass first."""
        found = {step: None for each in self.walk() if (step := each.made_by)}
        return tuple(sorted(found, key=lambda step: (-step.stage, step.sites)))

    @cached_property
    def exported(self) -> tuple[Node, ...]:
        """The nodes of the exported graph that it stands for, in their order there."""
        leaves = [each for each in self.walk() if each.made_by is None]
        order = {name: index for each in leaves for index, name in enumerate(each.graph.nodes)}
        found = {each.node.name: each.node for each in leaves}
        return tuple(sorted(found.values(), key=lambda node: order[node.name]))


class History:
    """Finds out where nodes come from.

    Args:
        store: of an artifact with records.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._steps: dict[tuple[int, str], Mapping[str, tuple[Step, tuple[str, ...]]]] = {}
        self._found: dict[tuple[int, str, str], Ancestor] = {}

    def of(self, stage: int, region: str, name: str) -> Ancestor:
        """The history of a node as it is after a pass.

        Args:
            stage: number of the pass; 0 for the graph as exported.
            region: the graph, as it is called there.
            name: of the node there.
        """
        while stage and not self._made_at(stage, region, name):
            if region in self._store.stages[stage].changed:
                before = self._store.stages[stage].ancestor(region)
                region = before.name if before is not None else region
            stage -= 1
        key = stage, region, name
        if key not in self._found:
            self._found[key] = self._trace(stage, region, name)
        return self._found[key]

    def touched(self, ancestor: Ancestor, stage: int, region: str, name: str) -> list[Step]:
        """The rewrites that gave a node other inputs or constants since it was made.

        Args:
            ancestor: its history.
            stage: up to this pass.
            region: the graph, as it is called there.
            name: of the node there.
        """
        since = 0 if ancestor.made_by is None else ancestor.made_by.stage
        found = []
        for at in reversed(self._store.stages[since + 1 : stage + 1]):
            if region not in at.changed:
                continue
            found += [
                _step(at, region, hunk)
                for hunk in region_diff(at, region).hunks
                if any(change.after == name for change in hunk.changed)
            ]
            before = at.ancestor(region)
            region = before.name if before is not None else region
        return found[::-1]

    def _made_at(self, stage: int, region: str, name: str) -> bool:
        at = self._store.stages[stage]
        return region in at.changed and name in self._steps_at(at, region)

    def _steps_at(self, stage: Stage, region: str) -> Mapping[str, tuple[Step, tuple[str, ...]]]:
        """Rewrite that made each new node of a region, and the nodes that it stands for."""
        key = stage.number, region
        if key not in self._steps:
            diff = region_diff(stage, region)
            made: dict[str, tuple[Step, tuple[str, ...]]] = {}
            # a pass on the whole program may take a call out at one end of a layer and put it in
            # at the other: what it does to a region without numbers is one rewrite
            whole = lineage(_joined([h for h in diff.hunks if not h.sites], region), diff.pairing)
            for hunk in diff.hunks:
                step = _step(stage, region, hunk)
                sources = lineage(hunk, diff.pairing) if hunk.sites else whole
                made |= {name: (step, sources.get(name, ())) for name in hunk.made}
            self._steps[key] = made
        return self._steps[key]

    def _trace(self, stage: int, region: str, name: str) -> Ancestor:
        at = self._store.stages[stage]
        graph = at.graphs[region]
        node = graph.nodes[name]
        if not stage:
            return Ancestor(node, graph, None)
        step, sources = self._steps_at(at, region)[name]
        before = at.ancestor(region)
        if before is None:
            return Ancestor(node, graph, step)
        came = [self.of(stage - 1, before.name, each) for each in sources]
        return Ancestor(node, graph, step, tuple(came))


def _joined(hunks: Sequence[Hunk], region: str) -> Hunk:
    return Hunk(
        region,
        "",
        (),
        tuple(name for hunk in hunks for name in hunk.removed),
        tuple(name for hunk in hunks for name in hunk.made),
        tuple(change for hunk in hunks for change in hunk.changed),
    )


def _step(stage: Stage, region: str, hunk: Hunk) -> Step:
    return Step(
        stage.number,
        stage.name,
        region,
        hunk.sites,
        hunk.path,
        hunk.made,
        hunk.removed,
        hunk.passing,
    )


def find_nodes(
    graphs: Mapping[str, Graph], name: str, regions: Sequence[str]
) -> list[tuple[Graph, Node]]:
    """The nodes of that name; in finished graphs, by their names while passes ran if there is none.

    Args:
        graphs: by region.
        name: ``q_a_proj``, or with its region: ``moe.long:q_a_proj``.
        regions: where to look.

    Raises:
        UserError: there is none; names the nearest.
    """
    region, colon, node = name.rpartition(":")
    if colon:
        if region not in graphs:
            raise UserError(unknown("region", region, list(graphs)))
        regions = [region]
    chosen = [graphs[each] for each in regions]
    found = [(graph, graph.nodes[node]) for graph in chosen if node in graph.nodes]
    found = found or [
        (graph, graph.by_old_name[node]) for graph in chosen if node in graph.by_old_name
    ]
    if not found:
        names = list(dict.fromkeys(each for graph in chosen for each in graph.nodes))
        raise UserError(f"{unknown('node', node, names)} (in {', '.join(regions)})")
    return found
