"""Reading and writing safetensors files with the memory of one tensor, or less.

The format (https://huggingface.co/docs/safetensors): eight bytes, little-endian, with the length of
a JSON header; the header, name -> dtype, shape and byte range; the data. Files are read with plain
reads into the final memory rather than mapped: a mapped file that is cut short while in use kills
the process, and its pages count as the process's memory.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.common.regular_files import open_regular
from dsa_compile.common.strict_json import loads_strictly
from dsa_compile.errors import UserError
from dsa_compile.weights.dtypes import SAFETENSORS_BITS, SAFETENSORS_DTYPES

# safetensors' own limit on the header
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: its type, its shape, and where its row-major data starts."""

    tag: str  # the type as the header names it, known or not
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def dtype(self) -> torch.dtype:
        """The type in torch; KeyError if torch has none."""
        return SAFETENSORS_DTYPES[self.tag]


@dataclass(frozen=True)
class SafetensorsFile:
    """The parsed header of one file; nothing of the data is held."""

    path: Path
    size: int  # bytes
    header_sha256: str
    tensors: dict[str, StoredTensor]
    error: type[UserError]

    @classmethod
    def open(cls, path: Path, error: type[UserError]) -> "SafetensorsFile":
        """Read and check a header: every tensor must lie inside the file, none over another.

        Raises:
            UserError: of the kind ``error``, naming the file and what is wrong with it.
        """
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                file.seek(0)
                header = _read_header(file, size, path, error)
        except OSError as problem:
            raise error(f"{path}: cannot be read ({problem.strerror})") from None
        start = 8 + len(header)
        tensors = _parse_header(header, start, size, path, error)
        return cls(path, size, hashlib.sha256(header).hexdigest(), tensors, error)

    def read_elements(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with the elements of tensor ``name``, row-major, from number ``start`` on.

        ``out`` must be contiguous, on the CPU and of the stored dtype.
        """
        self._read(name, [(start, tensor_bytes(out))], out.dtype)

    def read_rows(self, name: str, start: int, stride: int, out: Tensor) -> None:
        """Fill the rows of ``out`` from places in the tensor that are ``stride`` elements apart.

        Args:
            name: of the tensor.
            start: number of the first row's first element, row-major.
            stride: elements from one row to the next.
            out: ``[N, …]``, contiguous, on the CPU and of the stored dtype.
        """
        if out.numel() == len(out) * stride:
            self.read_elements(name, start, out)
        else:
            rows = [(start + n * stride, tensor_bytes(row)) for n, row in enumerate(out)]
            self._read(name, rows, out.dtype)

    def _read(
        self, name: str, targets: Iterable[tuple[int, memoryview]], dtype: torch.dtype
    ) -> None:
        stored = self.tensors[name]
        assert dtype == stored.dtype
        try:
            with open_regular(self.path) as file:
                for start, target in targets:
                    file.seek(stored.offset + start * stored.dtype.itemsize)
                    done = 0
                    while done < len(target):
                        count = file.readinto(target[done:])
                        if not count:
                            raise self.error(f"{self.path}: truncated while reading {name!r}")
                        done += count
        except OSError as problem:
            raise self.error(f"{self.path}: cannot be read ({problem.strerror})") from None


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, row-major, as writable bytes; nothing is copied."""
    assert tensor.is_contiguous()
    return tensor.view(-1).view(torch.uint8).numpy().data


def _read_header(file: FileIO, size: int, path: Path, error: type[UserError]) -> bytes:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > _MAX_HEADER:
        raise error(f"{path}: not a safetensors file (its header length is not plausible)")
    if 8 + length > size:
        raise error(f"{path}: truncated: its header alone needs {8 + length} bytes, it has {size}")
    return file.read(length)


def _parse_header(
    header: bytes, start: int, size: int, path: Path, error: type[UserError]
) -> dict[str, StoredTensor]:
    try:
        data = loads_strictly(header)
        if not isinstance(data, dict):
            raise ValueError("it is not an object")
        data.pop("__metadata__", None)
        spans = {name: _parse_tensor(name, value) for name, value in data.items()}
    except ValueError as problem:
        raise error(f"{path}: corrupt safetensors header ({problem})") from None
    end = 0
    for name, (_, _, first, last) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if first != end:
            raise error(f"{path}: corrupt safetensors header (data of {name!r} is out of place)")
        end = last
    if start + end != size:
        fault = "truncated" if start + end > size else "longer than its header says"
        raise error(f"{path}: {fault}: expected {start + end} bytes, it has {size}")
    return {
        name: StoredTensor(tag, shape, start + first)
        for name, (tag, shape, first, _) in spans.items()
    }


def _parse_tensor(name: str, value: object) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape and byte range (relative to the data) of one header entry; else ValueError.

    The byte range of a type that is not known is believed: perhaps no weight needs the tensor.
    """
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"entry {name!r} is malformed")
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(tag, str):
        raise ValueError(f"entry {name!r} is malformed")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError(f"entry {name!r} is malformed")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"entry {name!r} is malformed")
    bits = SAFETENSORS_BITS.get(tag)
    if bits is not None and 8 * (offsets[1] - offsets[0]) != math.prod(shape) * bits:
        raise ValueError(f"{name!r}: its byte range does not hold its shape")
    return tag, tuple(shape), offsets[0], offsets[1]
