"""The parts of a manifest, one frozen dataclass each; the JSON has the same fields."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ir.site import NearMiss
from dsa_compile.version import __version__

PRODUCER = "dsa-compile"
ABOUT = "passes/about.json"  # purpose of each pass by name: the docstring of its module
ACCEPTANCE = "acceptance.json"  # of drafts, as dsa-eval measured it; not listed either
TIMINGS = "timings.json"  # seconds by pass; not listed, so equal compilations are equal artifacts


@dataclass(frozen=True)
class Producer:
    """The software that wrote the artifact."""

    name: str
    version: str
    torch: str
    transformers: str

    @classmethod
    def current(cls) -> "Producer":
        """Producer record of this installation; no package is imported for its version."""
        return cls(PRODUCER, __version__, *map(metadata.version, ("torch", "transformers")))


@dataclass(frozen=True)
class ModelRecord:
    """The model compiled: its geometry, and a digest that tells one checkpoint from another."""

    spec: ModelSpec
    fingerprint: str


@dataclass(frozen=True)
class KernelRecord:
    """Provider of an op's kernel, for calls of up to ``max_tokens`` tokens; None: of any number."""

    provider: str
    max_tokens: int | None = None


@dataclass(frozen=True)
class RegionRecord:
    """One region: its graph file, and the same graph as Python to read."""

    name: str
    graph: str
    source: str


@dataclass(frozen=True)
class WeightFile:
    """A file that holds weights: bytes, hex SHA-256 of all of it and of its safetensors header.

    ``header_sha256`` is None for a file that is not safetensors.
    """

    name: str
    size: int
    sha256: str
    header_sha256: str | None

    @classmethod
    def of(cls, directory: Path, name: str, sha256: str) -> "WeightFile":
        """Describe a file whose content hash is known; its header is read.

        Raises:
            CheckpointError: it cannot be read or its header is damaged.
        """
        path = directory / name
        if path.suffix != ".safetensors":
            return cls(name, path.stat().st_size, sha256, None)
        # here: a reader of records alone does without torch
        from dsa_compile.weights.safetensors_file import SafetensorsFile

        opened = SafetensorsFile.open(path, CheckpointError)
        return cls(name, opened.size, sha256, opened.header_sha256)


@dataclass(frozen=True)
class WeightsRecord:
    """Place of the weights.

    Attributes:
        mode: ``reference`` (files of the model directory), ``pack`` (files under ``weights/``) or
            ``none``.
        plan: the artifact's file that says how weights are made, or None.
        model_dir: the model directory at compile time; given for ``reference``, else None.
        files: names relative to the model directory or to ``weights/``.
    """

    mode: str
    plan: str | None
    model_dir: str | None
    files: tuple[WeightFile, ...]


@dataclass(frozen=True)
class CacheRecord:
    """A paged cache of a kind of region: elements in a row, and their dtype."""

    key: str
    width: int
    dtype: str


@dataclass(frozen=True)
class PassSummary:
    """Summary of one pass.

    ``rewrites`` and ``expected`` count sites over all layers, ``by_region`` once a graph.
    ``before``, ``after`` and ``graphs`` are files of the artifact, if records were kept and
    anything changed: the changed regions as Python, and their graphs after the pass with its sites
    (:class:`~dsa_compile.ir.site.Site`). ``remarks`` are lines to read.
    """

    name: str
    numerics: str
    rewrites: int
    expected: int | None
    by_region: Mapping[str, int]
    nodes_before: int
    nodes_after: int
    near_misses: tuple[NearMiss, ...]
    before: str | None
    after: str | None
    graphs: str | None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileRecord:
    """A file of the artifact: its path there, its bytes, and their hex SHA-256."""

    path: str
    size: int
    sha256: str
