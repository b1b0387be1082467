"""Opening an artifact: nothing is used before it is checked."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dsa_compile.artifact.manifest import Manifest, open_manifest
from dsa_compile.artifact.paths import resolve_inside
from dsa_compile.artifact.records import FileRecord, WeightFile
from dsa_compile.common.regular_files import LARGEST_JSON, read_regular
from dsa_compile.common.strict_json import load_json
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.ir.graph_json import region_from_json
from dsa_compile.ir.hazards import find_hazards
from dsa_compile.ir.region import Region
from dsa_compile.weights.hashing import Hashes, hub_blob
from dsa_compile.weights.safetensors_file import SafetensorsFile

VERIFY = ("full", "header")
# Folders in which a file that the manifest does not list is an error, not clutter.
_CLOSED = ("graphs", "kernels", "tokenizer", "weights")


@dataclass(frozen=True)
class Artifact:
    """An artifact whose files are what its manifest says.

    Attributes:
        path: the directory.
        manifest: its parsed and checked manifest.
        verify: how thoroughly weight files are checked: ``full`` hashes them, ``header`` hashes
            the safetensors header and compares the size.
        later: the weight files' contents are hashed in the background, see :meth:`settle`.
    """

    path: Path
    manifest: Manifest
    verify: str
    later: bool = False
    _unsettled: list["_Contents"] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def _records(self) -> dict[str, FileRecord]:
        return {record.path: record for record in self.manifest.files}

    @classmethod
    def open(
        cls,
        path: Path | str,
        verify: str = "full",
        later: bool = False,
        digest: str | None = None,
    ) -> "Artifact":
        """Open a directory and check all of it but the weights of the model directory.

        Args:
            path: the directory.
            verify: see the class.
            later: go on while the contents of weight files are hashed; whoever opens an artifact
                so ends with :meth:`settle`, or with :meth:`abandon` if something else failed.
            digest: take this artifact and no other: the ``digest`` of its manifest.

        Raises:
            ArtifactError: it is no artifact, of another version, incomplete or edited; names the
                file. Or it has another digest.
            UserError: an unknown ``verify``, or a ``digest`` that is none.
        """
        path = Path(path)
        if verify not in VERIFY:
            raise UserError(f"unknown verify {verify!r}; choose one of {', '.join(VERIFY)}")
        artifact = cls(path, open_manifest(path, digest), verify, later)
        artifact._check_files()
        return artifact

    def settle(self) -> bool:
        """Wait for the checks in the background; returns whether there were any.

        Raises:
            ArtifactError: a weight file is not the one compiled.
        """
        found = bool(self._unsettled)
        try:
            while self._unsettled:
                self._unsettled[-1].compare()
                self._unsettled.pop()
        finally:
            self.abandon()
        return found

    def abandon(self) -> None:
        """Stop the checks in the background."""
        for contents in self._unsettled:
            contents.hashes.cancel()
        self._unsettled.clear()

    def region(self, name: str) -> Region:
        """Rebuild one region from its graph file.

        Raises:
            ArtifactError: no such region, or its file is not a graph of allowed ops, or one that
                could go wrong on several streams or in a captured graph.
        """
        graphs = {record.name: record.graph for record in self.manifest.regions}
        if name not in graphs:
            raise ArtifactError(f"{self.path}: has no region {name!r}, only {', '.join(graphs)}")
        region = region_from_json(self.read_json(graphs[name]))
        if region.name != name:
            raise ArtifactError(f"{self.path / graphs[name]}: holds region {region.name!r}")
        for hazard in find_hazards(region):
            raise ArtifactError(f"{self.path / graphs[name]}: {hazard}; or recompile")
        return region

    def read_json(self, path: str) -> Any:
        """The content of a listed JSON file.

        Raises:
            ArtifactError: as :meth:`read_bytes`, not JSON, or larger than
                :data:`~dsa_compile.common.regular_files.LARGEST_JSON`.
        """
        if (size := self._records[path].size if path in self._records else 0) > LARGEST_JSON:
            raise ArtifactError(f"{self.path / path}: {size} bytes, more than JSON files have")
        return load_json(self.read_bytes(path), str(self.path / path))

    def read_bytes(self, path: str) -> bytes:
        """The bytes of a listed file, checked once more: they are what the manifest hashed.

        Raises:
            ArtifactError: not listed, missing or changed since the artifact was opened.
        """
        if path not in self._records:
            raise ArtifactError(f"{self.path}: has no file {path!r}")
        record = self._records[path]
        try:
            data = read_regular(self._located(path), record.size)
        except OSError as error:
            raise ArtifactError(f"{self.path / path}: cannot be read ({error.strerror})") from None
        _compare(self.path / path, record.sha256, hashlib.sha256(data).hexdigest())
        return data

    def tokenizer_bytes(self, name: str) -> bytes | None:
        """The content of a tokenizer file, such as ``"tokenizer.json"``, as :meth:`read_bytes`.

        Returns:
            None if the model had no such file.

        Raises:
            ArtifactError: missing or changed since the artifact was opened.
        """
        path = f"tokenizer/{name}"
        return self.read_bytes(path) if path in self.manifest.tokenizer else None

    def model_dir(self, override: Path | None = None) -> Path:
        """The model directory that holds the weights, its files checked as ``verify`` says.

        Args:
            override: where the model is now, if it has moved since it was compiled.

        Raises:
            ArtifactError: the artifact does not refer to a model directory, or a file there is
                missing or not the one compiled.
        """
        recorded = self.manifest.weights.model_dir
        if recorded is None:
            mode = self.manifest.weights.mode
            raise ArtifactError(f"{self.path}: refers to no model directory (weights: {mode})")
        root = Path(recorded) if override is None else override
        if not root.is_dir():
            raise ArtifactError(
                f"{root}: no such directory; {self.path} takes its weights from there, "
                "say where the model is now (--model-dir)"
            )
        # Links are followed wherever they lead: a download cache is made of them.
        files = {root / file.name: file for file in self.manifest.weights.files}
        self._check_weights(_check_sizes(files, self.verify))
        return root

    def _check_weights(self, wanted: Mapping[Path, str]) -> None:
        if wanted:
            self._unsettled.append(_Contents(wanted))
        if not self.later:
            self.settle()

    def _located(self, path: str) -> Path:
        resolved = resolve_inside(self.path, path)
        if resolved is None:
            raise ArtifactError(
                f"{self.path / path}: missing, or not a file inside the artifact; recompile"
            )
        return resolved

    def _check_files(self) -> None:
        files = self.manifest.files
        packed: dict[str, WeightFile] = {}
        if self.manifest.weights.mode == "pack":
            packed = {f"weights/{file.name}": file for file in self.manifest.weights.files}
        weights = {self._located(path): packed[path] for path in packed}
        others = {self._located(file.path): file for file in files if file.path not in packed}
        _Contents(_check_sizes(others, "full")).compare()
        self._check_weights(_check_sizes(weights, self.verify))
        listed = {file.path for file in files}
        for folder in _CLOSED:
            for parent, _, names in os.walk(self.path / folder):
                for name in names:
                    extra = Path(parent, name).relative_to(self.path).as_posix()
                    if extra not in listed:
                        raise ArtifactError(
                            f"{self.path / extra}: not part of the artifact; remove it"
                        )


class _Contents:
    """Files whose contents are being hashed, with the hashes that they should have."""

    def __init__(self, wanted: Mapping[Path, str]) -> None:
        self.wanted = wanted
        self.hashes = Hashes(wanted, ArtifactError)

    def compare(self) -> None:
        for path, digest in self.hashes.result().items():
            _compare(path, self.wanted[path], digest)


def _check_sizes(files: Mapping[Path, FileRecord | WeightFile], verify: str) -> dict[Path, str]:
    """Compare sizes, and headers where there are any.

    Returns:
        The hashes of those whose contents are to be compared, all of them or those without header.
    """
    whole: dict[Path, str] = {}
    for path, record in files.items():
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read ({error.strerror}); {_CHANGED}") from None
        if size != record.size:
            raise ArtifactError(f"{path}: {size} bytes, {record.size} when compiled; {_mend(path)}")
        header = record.header_sha256 if isinstance(record, WeightFile) else None
        if header is not None:
            _compare(path, header, SafetensorsFile.open(path, ArtifactError).header_sha256)
        if header is None or verify == "full":
            whole[path] = record.sha256
    return whole


_CHANGED = "it has changed since, restore it or recompile"


def _compare(path: Path, recorded: str, found: str) -> None:
    if recorded != found:
        raise ArtifactError(f"{path}: not the content that was compiled; {_mend(path)}")


def _mend(path: Path) -> str:
    """What helps: a file of the Hub's cache is taken for what its name says, however often."""
    blob = hub_blob(path)
    return f"delete {blob} and download the model again" if blob else _CHANGED
