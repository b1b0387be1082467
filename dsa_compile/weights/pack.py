"""Packed weights: each region's finished weights in a file of its own, read straight into place."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from dsa_compile.errors import ArtifactError
from dsa_compile.weights.device_copies import DeviceCopies
from dsa_compile.weights.dtypes import SAFETENSORS_TAGS
from dsa_compile.weights.hashing import hash_files
from dsa_compile.weights.materialize import WeightSource
from dsa_compile.weights.plan import WeightEntry, WeightPlan
from dsa_compile.weights.safetensors_file import SafetensorsFile, StoredTensor, tensor_bytes

_SUFFIX = ".safetensors"
VERIFY_LEVELS = ("header", "full")


@dataclass(frozen=True)
class PackedFile:
    """One packed file: its name in the directory, bytes, SHA-256 of its whole content."""

    name: str
    size: int
    sha256: str


def write_packed(
    out_dir: Path,
    plan: WeightPlan,
    regions: Iterable[tuple[str, str, Mapping[str, str]]],
    source: WeightSource,
    progress: Callable[[int], None] | None = None,
    own: Mapping[str, Collection[str]] | None = None,
) -> tuple[PackedFile, ...]:
    """Write ``<stem>.safetensors`` for each (stem, kind, variables), holding one weight at a time.

    Args:
        out_dir: an existing directory; files of the same name are replaced.
        plan: which weights each kind takes.
        regions: the regions; stems are unique.
        source: where the weights come from.
        progress: called with the number of bytes written since its last call.
        own: keys of the weights to write for each stem, where regions have others in common, see
            :mod:`dsa_compile.weights.sharing`; a region without any gets no file. None for all.

    Raises:
        ArtifactError: a file cannot be written (disk full, no permission).
        CheckpointError: a weight cannot be read.
    """
    files: dict[str, PackedFile] = {}
    for stem, kind, variables in regions:
        path = Path(out_dir) / (stem + _SUFFIX)
        assert _is_plain(path.name), stem
        assert path.name not in files, f"two regions are called {stem!r}"
        entries = plan.entries(kind)
        if own is not None:
            entries = {key: entry for key, entry in entries.items() if key in own[stem]}
            if not entries:
                continue
        try:
            with path.open("wb") as file:
                sink = _HashedFile(file, progress)
                keys = _file_order(entries)
                sink.write(_header(keys, entries))
                for key in keys:
                    # no name for the weight: it must be gone before the next one is made
                    sink.write(tensor_bytes(_make(stem, key, entries[key], variables, source)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as problem:
            raise ArtifactError(f"{path}: cannot be written ({problem.strerror})") from None
        files[path.name] = PackedFile(path.name, sink.size, sink.sha256.hexdigest())
    return tuple(files.values())


class _HashedFile:
    def __init__(self, file: BinaryIO, progress: Callable[[int], None] | None) -> None:
        self._file = file
        self._progress = progress
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.sha256.update(data)
        self.size += len(data)
        if self._progress is not None:
            self._progress(len(data))


def _make(
    stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], source: WeightSource
) -> Tensor:
    weight = torch.empty(entry.shape, dtype=entry.torch_dtype)
    source.fill(stem, key, entry, variables, weight)
    return weight


def _file_order(entries: Mapping[str, WeightEntry]) -> list[str]:
    """Wide elements first, so that every tensor starts on a multiple of its element's size."""
    return sorted(entries, key=lambda key: -entries[key].torch_dtype.itemsize)


def _header(keys: Iterable[str], entries: Mapping[str, WeightEntry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key in keys:
        entry = entries[key]
        end = offset + math.prod(entry.shape) * entry.torch_dtype.itemsize
        fields[key] = {
            "dtype": SAFETENSORS_TAGS[entry.torch_dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class PackedWeights:
    """Read access to packed files; a :class:`WeightSource`. Made by :meth:`open`."""

    def __init__(self, files: Mapping[str, SafetensorsFile]) -> None:
        self._files = files
        self._copies: dict[torch.device, DeviceCopies] = {}

    @classmethod
    def open(
        cls, directory: Path, files: Sequence[PackedFile], verify: str = "header"
    ) -> "PackedWeights":
        """Check the ``files`` an artifact lists and read their headers.

        Args:
            directory: where they lie.
            files: as :func:`write_packed` returned them.
            verify: ``header`` checks sizes and headers, ``full`` hashes every byte.

        Raises:
            ArtifactError: a file is missing, changed, or named outside ``directory``.
        """
        assert verify in VERIFY_LEVELS, verify
        opened = {}
        for file in files:
            if not _is_plain(file.name):
                raise ArtifactError(f"packed weights: {file.name!r} is not a plain file name")
            path = Path(directory) / file.name
            if not path.exists():
                raise ArtifactError(f"{path}: missing; compile the model again")
            size = path.stat().st_size
            if size != file.size:
                raise ArtifactError(f"{path}: has {size} bytes, the artifact says {file.size}")
            opened[file.name.removesuffix(_SUFFIX)] = SafetensorsFile.open(path, ArtifactError)
        if verify == "full":
            paths = {Path(directory) / file.name: file.sha256 for file in files}
            hashes = hash_files(paths, ArtifactError)
            for path, digest in hashes.items():
                if digest != paths[path]:
                    raise ArtifactError(f"{path}: its content is not what was compiled (SHA-256)")
        return cls(opened)

    def read(self, stem: str, key: str) -> Tensor:
        """Weight ``key`` of the region ``stem``, on the CPU."""
        file, stored = self._stored(stem, key)
        out = torch.empty(stored.shape, dtype=stored.dtype)
        file.read_elements(key, 0, out)
        return out

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        """Read a weight into ``out``: see :class:`WeightSource`."""
        file, stored = self._stored(stem, key)
        tag = SAFETENSORS_TAGS[entry.torch_dtype]
        if stored.shape != entry.shape or stored.tag != tag:
            raise ArtifactError(
                f"{file.path}: {key!r} is {stored.tag} {list(stored.shape)}, "
                f"the weight plan says {tag} {list(entry.shape)}"
            )
        if out.device.type == "cpu" and out.is_contiguous():
            file.read_elements(key, 0, out)
        elif out.device.type == "cuda" and out.is_contiguous():
            if out.device not in self._copies:
                self._copies[out.device] = DeviceCopies(out.device)
            self._copies[out.device].read(file, key, out)
        else:
            out.copy_(self.read(stem, key))

    def _stored(self, stem: str, key: str) -> tuple[SafetensorsFile, StoredTensor]:
        file = self._files.get(stem)
        if file is None:
            raise ArtifactError(f"packed weights: the artifact lists no file for {stem!r}")
        if key not in file.tensors:
            raise ArtifactError(f"{file.path}: lacks the weight {key!r}")
        return file, file.tensors[key]


def _is_plain(name: str) -> bool:
    return (
        name.endswith(_SUFFIX) and "/" not in name and "\\" not in name and not name.startswith(".")
    )
