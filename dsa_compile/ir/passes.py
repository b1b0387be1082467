"""Passes: how one runs, is held to its promise, and is accounted for.

``Pass.__call__`` alone removes dead code, checks the graph, keeps the promise on matches, times and
records; a pass itself only says what to rewrite.
"""

import contextlib
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from dsa_compile.errors import CompileError
from dsa_compile.facts.config import TARGETS, CompileConfig
from dsa_compile.facts.formats import Formats
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.journal import Journal, SiteLimit
from dsa_compile.ir.pass_record import Numerics, PassRecord
from dsa_compile.ir.program import Program
from dsa_compile.ir.refusal import made_by, weights_read
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.site import NearMiss, Site

__all__ = ["Numerics", "Pass", "PassRecord", "RegionPass", "sweep"]

NEAR_MISSES_KEPT = 5  # of each region, deepest first


class Pass:
    """A rewrite of a program.

    Subclasses set ``numerics``, name the passes whose results they build on in ``requires``, and
    implement :meth:`run`; most derive from :class:`RegionPass`. ``formats`` are those that a pass
    reads or makes, by group of tensors, and ``targets`` what it is for: under a recipe with other
    formats, or for another target, it does not run. One that is for several ranks names their axis
    in ``cuts``, and runs where the layout has more than one along it.
    """

    numerics: ClassVar[Numerics] = Numerics.BITWISE
    requires: ClassVar[tuple[str, ...]] = ()
    formats: ClassVar[Formats] = {}
    targets: ClassVar[tuple[str, ...]] = TARGETS
    cuts: ClassVar[str] = ""

    @property
    def name(self) -> str:
        """Snake-case class name; the name of the module too."""
        text = type(self).__name__
        return "".join("_" + c.lower() if c.isupper() else c for c in text).lstrip("_")

    @property
    def about(self) -> str:
        """The docstring of the module, or of the class where the module has none.

        Its first line is the purpose; drawings of graphs before and after follow. Empty where
        Python strips docstrings.
        """
        return inspect.cleandoc(
            sys.modules[type(self).__module__].__doc__ or type(self).__doc__ or ""
        )

    def runs(self, config: CompileConfig) -> bool:
        """Whether this pass runs in a compilation."""
        return (
            self.name not in config.disable
            and config.formats.has(self.formats)
            and config.target in self.targets
            and (not self.cuts or config.layout.along(self.cuts) > 1)
        )

    def run(self, program: Program, record: PassRecord) -> None:
        """Rewrite ``program``; fill in ``record.by_region``."""
        raise NotImplementedError

    def expects(self, program: Program, region: Region) -> int | None:
        """Number of sites that this pass must find in a region, or None if it makes no promise."""
        return None

    def __call__(
        self,
        program: Program,
        limit: int | None = None,
        between: Callable[[Site], None] | None = None,
    ) -> PassRecord:
        """Run and account for the rewrites.

        Args:
            program: rewritten in place.
            limit: make only the first so many rewrites, and hold the pass to no promise; a pass
                that rewrites several regions together does so as one.
            between: called between any two rewrites with the first, the graphs not yet swept.

        Raises:
            CompileError: fewer sites matched than promised; names the nearest near-miss.
        """
        record = PassRecord(self.name, self.numerics, self.about, journal=Journal(limit, between))
        started = time.perf_counter()
        promised = {name: self.expects(program, r) for name, r in program.regions.items()}
        keep = program.config.records
        texts = program.texts
        before = {name: texts.of(region) for name, region in program.regions.items() if keep}
        record.nodes_before = _nodes(program)
        if not record.journal.full:
            self._run(program, record)
        sweep(program, self.name)
        record.nodes_after = _nodes(program)
        for name, region in program.regions.items():
            if keep and before.get(name) != (text := texts.of(region)):
                record.before[name] = before.get(name, "")
                record.after[name] = text
                record.graphs[name] = region_to_json(region)
        for name in before:
            if name not in program.regions:
                record.before[name], record.after[name] = before[name], ""
        self._account(program, record, promised if limit is None else {})
        record.seconds = time.perf_counter() - started
        program.records.append(record)
        return record

    def _run(self, program: Program, record: PassRecord) -> None:
        with contextlib.suppress(SiteLimit):
            self.run(program, record)
        if record.by_region and not record.journal.sites:
            record.journal.sites.append(Site(1, "", ""))

    def _account(
        self, program: Program, record: PassRecord, promised: dict[str, int | None]
    ) -> None:
        def layers(name: str) -> int:
            return program.multiplicity(name.partition(".")[0])

        record.rewrites = sum(n * layers(name) for name, n in record.by_region.items())
        for name, count in promised.items():
            if count is None:
                continue
            count -= min(count, record.left.get(name, 0))
            record.expected = (record.expected or 0) + count * layers(name)
            found = record.by_region.get(name, 0)
            if found < count:
                near = next((m for m in record.near_misses if m.region in ("", name)), None)
                raise CompileError(
                    f"pass {self.name}: matched {found} of {count} sites in {name!r} "
                    f"({layers(name)} layers); nearest miss: {near or 'nothing came near'}"
                    + _rewritten_last(program, name, near)
                )


class RegionPass(Pass):
    """A pass that looks at one region at a time."""

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Rewrite one region through ``edit``."""
        raise NotImplementedError

    def run(self, program: Program, record: PassRecord) -> None:
        """Apply :meth:`rewrite` to every region."""
        for name, region in program.regions.items():
            edit = Editor(region, program.world, self.name, record.journal)
            try:
                self.rewrite(edit, program)
            finally:  # also when the journal's limit ends the pass
                if edit.rewrites:
                    record.by_region[name] = edit.rewrites
                if edit.left:
                    record.left[name] = edit.left
            record.remarks += edit.remarks
            nearest = sorted(edit.misses, key=lambda miss: -miss.depth)
            record.near_misses += nearest[:NEAR_MISSES_KEPT]
        record.near_misses.sort(key=lambda miss: -miss.depth)


def _rewritten_last(program: Program, region: str, miss: NearMiss | None) -> str:
    """Pass that made the node of a miss, the one that rewrote its place last, or the region where
    nothing came near, and the weights read there: the names of such nodes say little."""
    found = program.regions.get(region)  # gone where the pass has split it
    nodes = found.graph.nodes if found else ()
    node = next((n for n in nodes if miss and n.name == miss.node), None)
    maker = None if node is None else (node.meta.get("origin"), node.meta.get("site"))
    kind = region.partition(".")[0]  # passes before the split knew it by that name
    for record in reversed(program.records):
        for site in reversed(record.journal.sites):
            here = site.region in (region, kind) or (not site.region and region in record.by_region)
            if not here or (miss and miss.node not in site.made and miss.path != site.path):
                continue
            last = f"; rewritten there last by {record.name} (site {site.number})"
            if node is None:
                return last
            if (made := made_by(node)) and maker != (record.name, site.number):
                last = made.replace(",", "; it was", 1) + last
            keys = weights_read(node)
            return f"{last}; it reads weight {', '.join(keys)}" if keys else last
    return ""


def _nodes(program: Program) -> int:
    """Computing nodes that one step runs, in the first variant."""
    variant = next(iter(program.variants), None)
    return sum(
        program.region(kind, variant).node_count() * program.multiplicity(kind)
        for kind in program.order
    )


def sweep(program: Program, pass_name: str) -> None:
    """Take dead code and values that nobody reads out of every region, as after every pass."""
    for region in program.regions.values():
        Editor(region, program.world, pass_name).sweep()
    _drop_unused_values(program)


def _drop_unused_values(program: Program) -> None:
    """Take out of every region's results the values that no region reads and no plan returns."""
    read = Counter(
        node.meta["key"] for r in program.regions.values() for node in r.inputs_of(Role.VALUE)
    )
    wanted = read.keys() | program.results
    for region in program.regions.values():
        keep = [i for i, name in enumerate(region.outputs) if name in wanted]
        if len(keep) == len(region.outputs):
            continue
        output = region.graph.output_node()
        output.args = (tuple(output.args[0][i] for i in keep),)  # type: ignore[index]
        region.outputs = tuple(region.outputs[i] for i in keep)
        region.graph.eliminate_dead_code()
        for node in region.inputs():
            if not node.users:
                region.graph.erase_node(node)
