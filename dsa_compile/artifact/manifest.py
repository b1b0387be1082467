"""``manifest.json``: what an artifact holds; written by the compiler, checked by every reader."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsa_compile.artifact.paths import is_plain, resolve_inside
from dsa_compile.artifact.records import (
    CacheRecord,
    FileRecord,
    KernelRecord,
    ModelRecord,
    PassSummary,
    Producer,
    RegionRecord,
    WeightsRecord,
)
from dsa_compile.common.regular_files import read_regular
from dsa_compile.common.strict_json import load_json, parse
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.dtype_names import DTYPE_NAMES
from dsa_compile.ir.plan import MODEL, VARIANTS, Call, Plan

FORMAT_VERSION = 7
MANIFEST = "manifest.json"
_CALL_NAME = re.compile(r"[a-z][a-z0-9_]*")
_REGION_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?")
_EDITED = "the file was edited, recompile"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """Contents of ``manifest.json``, from :meth:`build`; the writer adds ``files`` and ``digest``.

    Attributes:
        plans: what a step calls, by name of the plan; there is always :data:`MODEL`.
        compile: the options of the compilation; ``target``, ``recipe``, ``dtype`` and
            ``block_size`` repeat what a reader of the file looks for first.
        kernels: for each op in the graphs, by full name, the providers bound to it, in ascending
            order of tokens; the last takes any number.
        caches: the paged caches that a call of each kind of region reads and writes.
        variants: ``("long", "short")`` if regions are split by context length, with ``"prompt"``
            and ``"long_prompt"`` if some have graphs for prompts, else empty.
        exported: the file with the graphs before the first pass, if records were kept.
        tokenizer: files of the tokenizer and the generation defaults.
        files: every file but the manifest itself and the timings.
        digest: hex SHA-256 of the rest of the manifest, and so, through the hashes in it, of
            the whole artifact: its identity.
    """

    format_version: int
    producer: Producer
    target: str
    recipe: str
    dtype: str
    block_size: int
    compile: CompileConfig
    compile_digest: str
    model: ModelRecord
    plans: Mapping[str, Plan]
    regions: tuple[RegionRecord, ...]
    kernels: Mapping[str, tuple[KernelRecord, ...]]
    variants: tuple[str, ...]
    weights: WeightsRecord
    caches: Mapping[str, tuple[CacheRecord, ...]]
    exported: str | None
    passes: tuple[PassSummary, ...]
    tokenizer: tuple[str, ...]
    files: tuple[FileRecord, ...] = ()
    digest: str = ""

    @classmethod
    def build(
        cls,
        *,
        config: CompileConfig,
        model: ModelRecord,
        plans: Mapping[str, Plan],
        regions: tuple[RegionRecord, ...],
        kernels: Mapping[str, tuple[KernelRecord, ...]],
        variants: tuple[str, ...],
        weights: WeightsRecord,
        caches: Mapping[str, tuple[CacheRecord, ...]],
        exported: str | None = None,
        passes: tuple[PassSummary, ...] = (),
        tokenizer: tuple[str, ...] = (),
    ) -> "Manifest":
        """The manifest of a compilation by this installation, without its list of files."""
        return cls(
            format_version=FORMAT_VERSION,
            producer=Producer.current(),
            target=config.target,
            recipe=config.recipe,
            dtype=config.formats.compute.values,
            block_size=config.block_size,
            compile=config,
            compile_digest=config.digest(),
            model=model,
            plans=plans,
            regions=regions,
            kernels=kernels,
            variants=variants,
            weights=weights,
            caches=caches,
            exported=exported,
            passes=passes,
            tokenizer=tokenizer,
        )

    @property
    def layers(self) -> tuple[Call, ...]:
        """The calls of the model's decoder layers, in order."""
        return self.plans[MODEL].layers

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """Numbers of the layers whose weights are taken, those of all plans."""
        numbers = (call.layer for call in self.calls)
        return tuple(dict.fromkeys(number for number in numbers if number is not None))

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of all plans, plan by plan."""
        return tuple(call for plan in self.plans.values() for call in plan.calls)

    @property
    def cache_owners(self) -> dict[str, tuple[CacheRecord, ...]]:
        """The caches that each call owns, by its name; calls that own none are left out.

        Calls that share an owner's caches may each use some of them: the owner has all.
        """
        found: dict[str, dict[str, CacheRecord]] = {}
        for call in self.calls:
            if call.caches is not None:
                caches = self.caches.get(call.kind, ())
                found.setdefault(call.caches, {}).update({cache.key: cache for cache in caches})
        return {owner: tuple(caches.values()) for owner, caches in found.items() if caches}

    def sealed(self, files: tuple[FileRecord, ...]) -> "Manifest":
        """Manifest with its list of files and the digest over everything."""
        listed = replace(self, files=files)
        return replace(listed, digest=_digest(listed.to_json()))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; :func:`read_manifest` takes its text back."""
        return asdict(self) | {"compile": self.compile.to_json()}

    def problems(self) -> Iterator[str]:
        """Problems between fields, and those that types of single fields do not show."""
        if self.compile_digest != self.compile.digest():
            yield "compile_digest does not match compile"
        stated = (self.target, self.recipe, self.dtype, self.block_size)
        config = self.compile
        if stated != (
            config.target,
            config.recipe,
            config.formats.compute.values,
            config.block_size,
        ):
            yield "target, recipe, dtype or block_size differs from compile"
        for file in self.files:
            if not is_plain(file.path) or file.path == MANIFEST:
                yield f"files: {file.path!r:.80} is not a path inside the artifact"
            if file.size < 0 or not _SHA256.fullmatch(file.sha256):
                yield f"files: {file.path} has no valid size and sha256"
        yield from self._region_problems()
        yield from self._plan_problems()
        yield from self._weight_problems()
        listed = [file.path for file in self.files]
        if len(set(listed)) != len(listed):
            yield "files: a path is listed twice"
        for path in self._named_files():
            if path not in listed:
                yield f"{path!r:.80} is named but not listed in files"

    def _region_problems(self) -> Iterator[str]:
        names = [region.name for region in self.regions]
        if len(set(names)) != len(names):
            yield "regions: a name is listed twice"
        for region in self.regions:
            if not _REGION_NAME.fullmatch(region.name):
                yield f"regions: {region.name!r:.80} is not a region's name"
            if region.graph != f"graphs/{region.name}.json":
                yield f"regions: {region.name} has its graph in {region.graph!r:.80}"
        for op, kernels in self.kernels.items():
            limits = [kernel.max_tokens for kernel in kernels]
            inner = [limit for limit in limits[:-1] if limit is not None and limit > 0]
            if not kernels or limits[-1] is not None or limits[:-1] != sorted(set(inner)):
                yield f"kernels: {op:.80} needs providers by ascending tokens, the last for any"
        if self.variants not in (VARIANTS[:count] for count in (0, 2, 3, 4)):
            yield "variants should be empty, or long and short, with those of prompts or without"

    def _plan_problems(self) -> Iterator[str]:
        if MODEL not in self.plans:
            yield f"plans: none is called {MODEL!r}"
            return
        spec = self.model.spec
        for problem in spec.problems():
            yield f"model.spec: {problem}"
        kinds = {region.name.partition(".")[0] for region in self.regions}
        calls = {call.name: call for call in self.calls}
        if len(calls) < len(self.calls):
            yield "plans: two calls have the same name"
        for call in calls.values():
            if not _CALL_NAME.fullmatch(call.name):
                yield f"plans: {call.name!r:.80} is not the name of a call"
            if call.kind not in kinds:
                yield f"plans: no region for kind {call.kind!r:.80} of call {call.name}"
            last = spec.num_hidden_layers - (spec.mtp_layer is None)
            if call.layer is not None and not 0 <= call.layer <= last:
                yield f"plans: the model has no layer {call.layer}"
            if call.caches is not None and call.caches not in calls:
                yield f"plans: {call.name} shares the caches of {call.caches!r:.80}, not a call"
        for name, plan in self.plans.items():
            # a plan follows one before it, so that none follows itself
            before = list(self.plans)[: list(self.plans).index(name)]
            if plan.follows is not None and plan.follows not in before:
                yield f"plans: {name:.80} follows {plan.follows!r:.80}, no plan before it"
        for kind, caches in self.caches.items():
            if kind not in kinds:
                yield f"caches: no region for kind {kind!r:.80}"
            for cache in caches:
                if cache.width < 1 or cache.dtype not in DTYPE_NAMES:
                    yield f"caches: {cache.key!r:.80} has no valid width and dtype"

    def _weight_problems(self) -> Iterator[str]:
        weights = self.weights
        if weights.mode != self.compile.weights:
            yield "weights.mode differs from compile.weights"
        if (weights.model_dir is None) == (weights.mode == "reference"):
            yield "weights.model_dir goes with weights.mode reference, and only with it"
        listed = {(file.path, file.size, file.sha256) for file in self.files}
        for file in weights.files:
            if not is_plain(file.name):
                yield f"weights.files: {file.name!r:.80} leaves its directory"
            if file.size < 0 or not _SHA256.fullmatch(file.sha256):
                yield f"weights.files: {file.name} has no valid size and sha256"
            elif weights.mode == "pack" and (
                (f"weights/{file.name}", file.size, file.sha256) not in listed
            ):
                yield f"weights.files: {file.name} is not listed in files"

    def _named_files(self) -> Iterator[str]:
        for region in self.regions:
            yield from (region.graph, region.source)
        for summary in self.passes:
            files = (summary.before, summary.after, summary.graphs)
            yield from (path for path in files if path is not None)
        if self.exported is not None:
            yield self.exported
        if self.weights.plan is not None:
            yield self.weights.plan
        yield from self.tokenizer


def _digest(data: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in data.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def open_manifest(path: Path, digest: str | None = None) -> Manifest:
    """The manifest of an artifact.

    Args:
        path: of its directory.
        digest: take the artifact with this ``digest`` and no other.

    Raises:
        ArtifactError: it is no artifact, of another format version, its manifest was edited, or it
            has another digest.
        UserError: ``digest`` is none.
    """
    if digest is not None and not _SHA256.fullmatch(digest):
        raise UserError(f"digest={digest!r:.80} must be 64 hexadecimal digits, in lower case")
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise ArtifactError(f"{path}: {what}; give the output of dsa-compile")
    file = resolve_inside(path, MANIFEST)
    if file is None:
        raise ArtifactError(f"{path / MANIFEST}: missing; is this an artifact?")
    try:
        data = read_regular(file)
    except OSError as error:
        raise ArtifactError(f"{file}: cannot be read ({error.strerror})") from None
    manifest = read_manifest(data, str(path / MANIFEST))
    if digest not in (None, manifest.digest):
        raise ArtifactError(
            f"{path}: its digest is {manifest.digest}, and {digest} was wanted; "
            "it is another artifact or was compiled again"
        )
    return manifest


def read_manifest(data: bytes, where: str) -> Manifest:
    """Parse and check the text of a manifest.

    Args:
        data: the bytes of the file.
        where: how error messages call it, such as ``"out/manifest.json"``.

    Raises:
        ArtifactError: not a manifest, of another format version, or inconsistent.
    """
    content = load_json(data, where)
    version = content.get("format_version") if isinstance(content, dict) else None
    if type(version) is not int:
        raise ArtifactError(f"{where}: not the manifest of an artifact (no format_version)")
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{where}: format version {version}, this dsa-compile reads {FORMAT_VERSION}; "
            "recompile with this version or load with the one that compiled it"
        )
    manifest = parse(Manifest, content, where)
    # over the JSON as it stands: a float written as 0 must not count as an edit
    if manifest.digest != _digest(content):
        raise ArtifactError(f"{where}: digest does not match the rest; {_EDITED}")
    for problem in manifest.problems():
        raise ArtifactError(f"{where}: {problem}; {_EDITED}")
    return manifest
