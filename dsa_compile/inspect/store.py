"""The records of an artifact, read when needed: the program after every pass.

Stage 0 is the program as exported, stage n the one after the n-th pass; each pass records only the
regions that it changed, so the program at a stage is the last graph of each region up to there.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dsa_compile.artifact.manifest import Manifest, open_manifest
from dsa_compile.artifact.paths import resolve_inside
from dsa_compile.artifact.records import ABOUT, TIMINGS, PassSummary
from dsa_compile.common.names import hint, nearest
from dsa_compile.common.regular_files import read_regular
from dsa_compile.common.strict_json import load_json, parse
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.inspect.about import About, parse_about
from dsa_compile.ir.graph import Graph, graph_from_json
from dsa_compile.ir.plan import Call, region_name
from dsa_compile.ir.site import Site

EXPORT = "export"
_MOST_CHOICES = 50  # that a line lists


class Stage:
    """The program after one pass.

    Attributes:
        number: of the pass, from 1; 0 for the program as exported.
        name: of the pass, or ``export``.
        summary: what the manifest says of the pass; None for the export.
    """

    def __init__(self, store: "Store", number: int, summary: PassSummary | None) -> None:
        self._store = store
        self.number = number
        self.name = EXPORT if summary is None else summary.name
        self.summary = summary

    @property
    def changed(self) -> Mapping[str, Graph]:
        """The graphs of the regions that the pass changed, after it; all of them at stage 0."""
        return self._content[0]

    @property
    def sites(self) -> tuple[Site, ...]:
        """The rewrites of the pass, in order."""
        return self._content[1]

    @cached_property
    def graphs(self) -> Mapping[str, Graph]:
        """Graphs of all regions after the pass, by name."""
        if self.number == 0:
            return self.changed
        graphs = dict(self.before)
        for name in self.changed:
            graphs.pop(name.partition(".")[0], None)  # split into variants
        graphs.update(self.changed)
        order = [*self.before, *self.changed]
        return {name: graphs[name] for name in dict.fromkeys(order) if name in graphs}

    @property
    def before(self) -> Mapping[str, Graph]:
        """Graphs of all regions before the pass, by name; none at stage 0."""
        return self._store.stages[self.number - 1].graphs if self.number else {}

    def ancestor(self, region: str) -> Graph | None:
        """The graph that a region was before the pass: ``moe`` for ``moe.long`` as it is split, and
        ``moe.short`` for ``moe.prompt``."""
        kind, _, variant = region.partition(".")
        return self.before.get(region_name(self.before, kind, variant or None))

    @cached_property
    def _content(self) -> tuple[Mapping[str, Graph], tuple[Site, ...]]:
        path = self._store.manifest.exported if self.summary is None else self.summary.graphs
        if path is None:
            return {}, ()
        data = self._store.read_json(path)
        where = str(self._store.path / path)
        if not isinstance(data, dict) or not isinstance(data.get("regions"), list):
            raise ArtifactError(f"{where}: not the record of a pass; recompile")
        graphs = [graph_from_json(region, where) for region in data["regions"]]
        sites = parse(tuple[Site, ...], data.get("sites", []), f"{where}: sites")
        return {graph.name: graph for graph in graphs}, sites


class Store:
    """An artifact's records. Files are read when needed, and checked against their hashes.

    Args:
        path: the artifact's directory.
        manifest: of it.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._files = {record.path: record for record in manifest.files}

    @classmethod
    def open(cls, path: Path | str) -> "Store":
        """Read the manifest of an artifact.

        Raises:
            ArtifactError: it is no artifact, of another format version, or its manifest was edited.
        """
        path = Path(path)
        return cls(path, open_manifest(path))

    @property
    def has_records(self) -> bool:
        """Whether the program was recorded after every pass."""
        return self.manifest.exported is not None

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The export, and one stage a pass.

        Raises:
            ArtifactError: the artifact was compiled without records.
        """
        if not self.has_records:
            raise ArtifactError(
                f"{self.path}: compiled with --no-records, so what each pass did is not known; "
                "recompile without it"
            )
        summaries = enumerate(self.manifest.passes, start=1)
        return (Stage(self, 0, None), *(Stage(self, n, summary) for n, summary in summaries))

    @cached_property
    def about(self) -> Mapping[str, About]:
        """Purpose of each pass, by its name; empty if the artifact does not record it.

        Raises:
            ArtifactError: the record is damaged.
        """
        if ABOUT not in self._files:
            return {}
        kind: Any = Mapping[str, str]
        texts = parse(kind, self.read_json(ABOUT), str(self.path / ABOUT))
        return {name: parse_about(text) for name, text in texts.items()}

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds that each pass took, by its name; empty if they are not recorded.

        Raises:
            ArtifactError: the record is damaged.
        """
        file = resolve_inside(self.path, TIMINGS)
        if file is None:
            return {}
        kind: Any = Mapping[str, float]
        where = str(self.path / TIMINGS)
        found: Mapping[str, float] = parse(kind, load_json(file.read_bytes(), where), where)
        return found

    @cached_property
    def final(self) -> Mapping[str, Graph]:
        """The finished graphs, by region; their nodes have readable names."""
        return {
            record.name: graph_from_json(
                self.read_json(record.graph), str(self.path / record.graph)
            )
            for record in self.manifest.regions
        }

    def stage(self, name: str) -> Stage:
        """The stage after a pass, by its name or number (``13`` or ``13_recognize_swiglu``).

        Raises:
            UserError: there is none; names the nearest.
            ArtifactError: no records.
        """
        if name in (EXPORT, "0", f"00_{EXPORT}"):
            return self.stages[0]
        return self.stages[self.pass_number(name)]

    def pass_number(self, name: str) -> int:
        """The number of a pass, from 1, by its name or number; needs no records.

        Raises:
            UserError: there is none; names the nearest.
        """
        names = [summary.name for summary in self.manifest.passes]
        number, _, rest = name.partition("_")
        if number.isdecimal() and 0 < int(number) <= len(names):
            if rest in ("", names[int(number) - 1]):
                return int(number)
        elif name in names:
            return names.index(name) + 1
        raise UserError(unknown("pass", name, names))

    @property
    def layers(self) -> tuple[Call, ...]:
        """The first call of each decoder layer, those of draft plans after the model's."""
        calls = (call for call in self.manifest.calls if call.layer is not None)
        first: dict[int, Call] = {}
        for call in calls:
            first.setdefault(call.index, call)
        return tuple(first.values())

    def layer(self, index: int) -> Call:
        """A layer by its number in the model; the MTP layer's is the one after the last.

        Raises:
            UserError: the artifact has no such layer.
        """
        layers = self.layers
        for layer in layers:
            if layer.index == index:
                return layer
        nearest = min(layers, key=lambda layer: abs(layer.index - index)).index
        raise UserError(
            f"no layer {index} in {self.path} (layers {ranges(e.index for e in layers)}); "
            f"the nearest is {nearest}"
        )

    def layers_of(self, region: str) -> tuple[int, ...]:
        """The numbers of the layers that run a region; none where no decoder layer does."""
        kind = region.partition(".")[0]
        return tuple(layer.index for layer in self.layers if layer.kind == kind)

    def times(self, region: str) -> int:
        """Number of calls of all plans that run a region of this kind."""
        kind = region.partition(".")[0]
        return sum(call.kind == kind for call in self.manifest.calls)

    def read_bytes(self, path: str) -> bytes:
        """The content of a file of the artifact.

        Raises:
            ArtifactError: not listed, missing, or not what was compiled.
        """
        record = self._files.get(path)
        file = None if record is None else resolve_inside(self.path, path)
        if record is None or file is None:
            raise ArtifactError(f"{self.path / path}: missing; restore it or recompile")
        try:
            data = read_regular(file)
        except OSError as error:
            raise ArtifactError(f"{file}: cannot be read ({error.strerror})") from None
        if hashlib.sha256(data).hexdigest() != record.sha256:
            raise ArtifactError(
                f"{self.path / path}: not the content that was compiled; restore it or recompile"
            )
        return data

    def read_json(self, path: str) -> Any:
        """The content of a JSON file of the artifact."""
        return load_json(self.read_bytes(path), str(self.path / path))


def unknown(what: str, name: str, choices: Sequence[str]) -> str:
    """The line for a name that is not there: the nearest if one is near, else all."""
    listed = [*choices[:_MOST_CHOICES], *["…"] * (len(choices) > _MOST_CHOICES)]
    known = choices if nearest(name, choices) else listed
    return f"unknown {what} {name!r}{hint(name, known)}"


def ranges(numbers: Iterable[int]) -> str:
    """``3-60`` or ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
