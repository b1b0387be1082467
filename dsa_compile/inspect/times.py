"""Measured time, attributed to the rewrites that made the calls which take it.

``dsa-bench step --by-op`` tells time by op and module, ``--profile`` by op and types. Calls of a
region that share such a label cannot be distinguished: they share its time equally.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsa_compile.errors import UserError
from dsa_compile.inspect.measured import Case, Share
from dsa_compile.inspect.store import Store
from dsa_compile.inspect.why import History, Step
from dsa_compile.ir.graph import Graph, Node, typed_call

_EXPORTED = "(as exported)"


@dataclass(frozen=True)
class CallTime:
    """One call of a finished graph.

    Attributes:
        region: the graph.
        node: its name.
        op: what it calls, as ``dsa-bench step`` names it.
        path: the module of the reference model.
        us: microseconds that it adds to a layer.
        launches: of kernels; None if not known.
        kernels: their names.
        shared: how many calls share the time reported for them; 1 if it is its own.
        step: the rewrite that made it; None if it is as exported.
    """

    region: str
    node: str
    op: str
    path: str
    us: float
    launches: float | None
    kernels: tuple[str, ...]
    shared: int
    step: Step | None

    @property
    def pass_name(self) -> str:
        """The pass that made it."""
        return _EXPORTED if self.step is None else self.step.name


@dataclass(frozen=True)
class SiteTime:
    """The calls that one rewrite made, in one region.

    Attributes:
        region: the graph.
        pass_name: of the pass.
        number: of the pass; 0 for calls as exported.
        sites: numbers of the rewrites.
        path: the module.
        us: microseconds a layer.
        launches: likewise; None if not known.
        nodes: names of the calls.
        ops: that they call.
    """

    region: str
    pass_name: str
    number: int
    sites: tuple[int, ...]
    path: str
    us: float
    launches: float | None
    nodes: tuple[str, ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class PassTime:
    """The calls that a pass made, over the regions measured.

    Attributes:
        pass_name: of the pass.
        number: of the pass; 0 for calls as exported.
        us: microseconds: of a layer, or of a step where all regions were measured.
        launches: likewise; None if not known.
        calls: how many.
    """

    pass_name: str
    number: int
    us: float
    launches: float | None
    calls: int


@dataclass(frozen=True)
class Attribution:
    """Time of some regions, attributed to their calls.

    Attributes:
        regions: those measured.
        calls: each with its time, in order.
        unmatched: labels with time that no call of the artifact has, and that time.
        untimed: names of calls without a time.
    """

    regions: tuple[str, ...]
    calls: tuple[CallTime, ...]
    unmatched: Mapping[str, float]
    untimed: tuple[str, ...]

    def by_site(self) -> list[SiteTime]:
        """A row a rewrite, the longest first."""
        groups: dict[tuple[object, ...], list[CallTime]] = defaultdict(list)
        for call in self.calls:
            step = call.step
            key = (call.region, call.pass_name, () if step is None else (step.sites, step.path))
            groups[key].append(call)
        rows = [_site(calls) for calls in groups.values()]
        return sorted(rows, key=lambda row: -row.us)

    def by_pass(self, times: Mapping[str, int] | None = None) -> list[PassTime]:
        """A row a pass, the longest first.

        Args:
            times: by region, how often to count it; once without.
        """
        groups: dict[str, list[CallTime]] = defaultdict(list)
        for call in self.calls:
            groups[call.pass_name].append(call)
        count = times or dict.fromkeys(self.regions, 1)
        rows = [
            PassTime(
                name,
                0 if calls[0].step is None else calls[0].step.stage,
                sum(call.us * count[call.region] for call in calls),
                _sum([None if c.launches is None else c.launches * count[c.region] for c in calls]),
                len(calls),
            )
            for name, calls in groups.items()
        ]
        return sorted(rows, key=lambda row: -row.us)


def attribute_case(store: Store, case: Case) -> Attribution:
    """Attribute the time by op of one case to the calls of a layer.

    Args:
        store: of the program that was timed; it may have more layers.
        case: with times by op.

    Raises:
        UserError: the case has no times by op, or none for any call of this artifact.
    """
    if not case.ops:
        raise UserError(
            f"{case.label}: no times by op; time it with dsa-bench step --by-op -o FILE"
        )
    graph = _fitting(store, case)
    labelled: dict[str, list[Node]] = defaultdict(list)
    for node in _timed_calls(graph):
        labelled[_label(node)].append(node)
    unmatched = {label: share.us for label, share in case.ops.items() if label not in labelled}
    return _attribute(store, {graph.name: (labelled, case.ops)}, unmatched)


def attribute_profile(store: Store, context: int, calls: Mapping[str, float]) -> Attribution:
    """Attribute times of single calls to all calls of a step.

    Args:
        store: of the program that was timed.
        context: of the step that was measured, in tokens; says which variant ran.
        calls: microseconds by call, as in :mod:`dsa_compile.ir.stream_profile`.

    Raises:
        UserError: none of them is a call of this artifact.
    """
    topk = store.manifest.model.spec.index_topk
    variant = "short" if context <= topk else "long"
    seen: set[str] = set()
    parts = {}
    for graph in store.final.values():
        if graph.variant not in ("", variant):
            continue
        labelled: dict[str, list[Node]] = defaultdict(list)
        for node in _timed_calls(graph):
            types = {name: graph.nodes[name].type_text or "None" for name in node.inputs}
            key = typed_call(node.target, [*node.args, *node.kwargs.values()], types)
            labelled[key].append(node)
        seen |= labelled.keys()
        # each call was timed by itself: those that are alike all take as long
        alike = {key: Share(us * len(labelled.get(key, ()))) for key, us in calls.items()}
        parts[graph.name] = labelled, alike
    if not seen & calls.keys():
        raise UserError(f"the profile has no call of {store.path}; was it made for this program?")
    return _attribute(store, parts, {key: us for key, us in calls.items() if key not in seen})


def _timed_calls(graph: Graph) -> list[Node]:
    """The calls of ops; entries of results and what steers streams take no time."""
    steering = ("dsa.on_stream.", "dsa.record_event.", "dsa.wait_event.", "dsa.keep_alive.")
    return [node for node in graph.calls if not node.target.startswith((*steering, "operator."))]


def _label(node: Node) -> str:
    """Label of a call in ``dsa-bench step --by-op``: its op and its module."""
    op = node.target.removeprefix("dsa.").removesuffix(".default")
    return f"{op} {node.path}".strip()


def _fitting(store: Store, case: Case) -> Graph:
    """The graph that was timed: of the kind reported, and of the variant whose calls fit best.

    A short variant's calls may all be in the long one too: then the one with fewer others.
    """
    graphs = [g for g in store.final.values() if case.kind in ("", g.kind)]
    if not graphs:
        raise UserError(f"{case.label}: times of {case.kind} layers, and {store.path} has none")
    found = []
    for graph in graphs:
        timed = [_label(node) in case.ops for node in _timed_calls(graph)]
        found.append((sum(timed), -timed.count(False)))
    if not max(found)[0]:
        raise UserError(f"{case.label}: no op timed is in {store.path}; was it compiled alike?")
    return graphs[found.index(max(found))]


def _attribute(
    store: Store,
    parts: Mapping[str, tuple[Mapping[str, Sequence[Node]], Mapping[str, Share]]],
    unmatched: Mapping[str, float],
) -> Attribution:
    history = History(store)
    last = store.stages[-1].number
    calls: list[CallTime] = []
    untimed: list[str] = []
    for region, (labelled, shares) in parts.items():
        for label, nodes in labelled.items():
            share = shares.get(label)
            if share is None:
                untimed += [node.name for node in nodes]
                continue
            for node in nodes:
                ancestor = history.of(last, region, node.was or node.name)
                calls.append(_call(region, node, share, len(nodes), ancestor.made_by))
    return Attribution(tuple(parts), tuple(calls), unmatched, tuple(untimed))


def _call(region: str, node: Node, share: Share, shared: int, step: Step | None) -> CallTime:
    launches = None if share.launches is None else share.launches / shared
    return CallTime(
        region,
        node.name,
        node.target.removeprefix("dsa.").removesuffix(".default"),
        node.path,
        share.us / shared,
        launches,
        share.kernels,
        shared,
        step,
    )


def _site(calls: Sequence[CallTime]) -> SiteTime:
    first = calls[0]
    step = first.step
    paths = dict.fromkeys(call.path for call in calls)
    return SiteTime(
        first.region,
        first.pass_name,
        0 if step is None else step.stage,
        () if step is None else step.sites,
        ", ".join(path for path in paths if path),
        sum(call.us for call in calls),
        _sum([call.launches for call in calls]),
        tuple(call.node for call in calls),
        tuple(dict.fromkeys(call.op for call in calls)),
    )


def _sum(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
