"""A model directory's weights: checked whole from the headers, then read a slab at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.model_spec import ModelSpec
from dsa_compile.weights.block_fp8 import BLOCK, blocks, quantize_rows
from dsa_compile.weights.canonical import ParameterInfo, canonical_parameters
from dsa_compile.weights.hashing import hash_files
from dsa_compile.weights.layout import Matrix, Part, matrices, stored_parts
from dsa_compile.weights.materialize import write_expr
from dsa_compile.weights.plan import WeightEntry
from dsa_compile.weights.safetensors_file import SafetensorsFile
from dsa_compile.weights.shard_index import read_shard_index
from dsa_compile.weights.validation import FP8, check_part, open_homes, require_keys, set_aside

# Bytes of stored data held at once when they cannot be read straight into place.
_SLAB = 8 << 20


@dataclass(frozen=True)
class CheckpointFile:
    """One weight file: its name relative to the model directory, bytes, SHA-256 of its header."""

    name: str
    size: int
    header_sha256: str


class Checkpoint:
    """Read access by canonical parameter name; made by :meth:`open`.

    Attributes:
        notes: one line for each thing set aside on purpose, such as a multi-token-prediction layer.
        files: the files that hold what was asked for, by name; others are never opened.
    """

    def __init__(
        self,
        model_dir: Path,
        parameters: Mapping[str, ParameterInfo],
        parts: Mapping[str, tuple[Part, ...]],
        homes: Mapping[str, SafetensorsFile],
        block: tuple[int, int] | None,
        notes: tuple[str, ...],
    ) -> None:
        self.notes = notes
        self._model_dir = model_dir
        self._parameters = parameters
        self._parts = parts
        self._homes = homes
        self._block = block
        self._raw, self._values = _Scratch(), _Scratch()
        files = {home.path: home for home in homes.values()}
        self.files = tuple(
            CheckpointFile(self._name(path), home.size, home.header_sha256)
            for path, home in sorted(files.items())
        )

    @classmethod
    def open(cls, model_dir: Path, spec: ModelSpec, layers: Sequence[int]) -> "Checkpoint":
        """Find and check every parameter of ``layers``, the embedding and the head.

        Takes one ``model.safetensors`` or shards with an index; experts fused or one matrix each;
        float8_e4m3fn with block scales, or plain fp32, bf16 or fp16. Only headers are read.

        Raises:
            CheckpointError: anything missing, extra, repeated, truncated, or of another shape or
                dtype than ``spec`` says; names the file and the key.
        """
        model_dir = Path(model_dir)
        index = read_shard_index(model_dir)
        parameters = canonical_parameters(spec, layers)
        parts = {n: stored_parts(n, p.shape, index) for n, p in parameters.items()}
        wanted = [part for group in parts.values() for part in group]
        require_keys(model_dir, [part.key for part in wanted], index)
        used = {part.key for part in wanted}
        used |= {part.scale_key for part in wanted if part.scale_key in index}
        homes = open_homes(model_dir, used, index)
        block = spec.quantization.block if spec.quantization else None
        for part in wanted:
            check_part(part, homes, block)
        unused = [key for key in index if key not in used]
        notes = set_aside(model_dir, unused, spec, layers)
        return cls(model_dir, parameters, parts, homes, block, notes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter; raises CheckpointError if there is none of that name."""
        return self._parameter(name).shape

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype on disk (of the first expert, where each is stored apart)."""
        self._parameter(name)
        key = self._parts[name][0].key
        return self._homes[key].tensors[key].dtype

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill ``out`` (of the parameter's shape, any strides, dtype or device) with a parameter.

        FP8 blocks are dequantised in fp32 and rounded once, to ``out.dtype``. Beyond ``out`` this
        holds a few megabytes, whatever the parameter's size. Not for several threads at once.
        """
        assert tuple(out.shape) == self.shape(name), (name, out.shape)
        for part in self._parts[name]:
            if part.expert is None:
                self._read_part(part, out)
            else:
                self._read_part(part, out[part.expert].narrow(0, part.row, part.shape[0]))

    def read_quantized(
        self, name: str, stacked: int, values: Tensor | None, scales: Tensor | None
    ) -> None:
        """Fill e4m3 ``values`` and fp32 ``scales``, where given, with a parameter in FP8 blocks.

        What is stored in blocks of 128×128 is copied; anything else is quantised so.

        Args:
            name: of the parameter, a matrix ``[N, K]`` or experts ``[E, N, K]``.
            stacked: matrices one above the other in N that are quantised each on its own.
            values: of the parameter's shape, any strides or device.
            scales: of :func:`~dsa_compile.weights.block_fp8.scale_shape`, likewise.

        Raises:
            CheckpointError: stored in blocks of another size.
        """
        for part in self._parts[name]:
            for matrix in matrices(part, stacked):
                self._read_matrix(part, matrix, matrix.of(values), matrix.scales_of(scales))

    def _read_matrix(
        self, part: Part, matrix: Matrix, values: Tensor | None, scales: Tensor | None
    ) -> None:
        home = self._homes[part.key]
        dtype = home.tensors[part.key].dtype
        if dtype == FP8:
            if self._block != (BLOCK, BLOCK):
                raise CheckpointError(
                    f"{home.path}: {part.key} is quantised in blocks of {self._block}, recipe fp8 "
                    f"takes {BLOCK}x{BLOCK}; compile with --recipe bf16"
                )
            if scales is not None:
                scales.copy_(self._stored_scales(part))
            if values is None:
                return
        step = max(BLOCK, _SLAB // matrix.width // BLOCK * BLOCK)
        for row in range(0, matrix.height, step):
            height = min(step, matrix.height - row)
            slab = self._raw.take((height, matrix.width), dtype)
            home.read_elements(part.key, matrix.first + row * matrix.width, slab)
            if dtype == FP8:
                assert values is not None
                values[row : row + height].copy_(slab)
                continue
            quantized, scale = quantize_rows(slab.float())
            if values is not None:
                values[row : row + height].copy_(quantized)
            if scales is not None:
                scales[row // BLOCK : blocks(row + height)].copy_(scale)

    def fill(
        self, stem: str, key: str, entry: WeightEntry, variables: Mapping[str, str], out: Tensor
    ) -> None:
        """Make one weight of a compiled model in ``out``: see :class:`WeightSource`."""
        write_expr(entry.expr, variables, self, out)

    def hash_files(self, progress: Callable[[int], None] | None = None) -> dict[str, str]:
        """Hex SHA-256 of each file's whole content, by name; ``progress`` gets bytes done."""
        paths = [self._model_dir / file.name for file in self.files]
        hashes = hash_files(paths, CheckpointError, trust_hub_cache=True, progress=progress)
        return {self._name(path): digest for path, digest in hashes.items()}

    def _parameter(self, name: str) -> ParameterInfo:
        if name not in self._parameters:
            raise CheckpointError(f"{self._model_dir}: the compiled layers have no {name!r}")
        return self._parameters[name]

    def _name(self, path: Path) -> str:
        return path.relative_to(self._model_dir).as_posix()

    def _read_part(self, part: Part, out: Tensor) -> None:
        home = self._homes[part.key]
        stored = home.tensors[part.key]
        if stored.dtype == FP8:
            self._read_quantised(part, out)
        elif stored.dtype == out.dtype and out.is_contiguous() and out.device.type == "cpu":
            home.read_elements(part.key, 0, out)
        else:
            self._read_plain(home, part.key, 0, out)

    def _read_plain(self, home: SafetensorsFile, key: str, start: int, out: Tensor) -> None:
        """Copy and convert the elements of ``out`` from number ``start`` of the stored tensor."""
        if out.dim() > 2:
            for number, matrix in enumerate(out):
                self._read_plain(home, key, start + number * matrix.numel(), matrix)
            return
        width = out[0].numel()
        dtype = home.tensors[key].dtype
        step = max(1, _SLAB // (width * dtype.itemsize))
        for row in range(0, len(out), step):
            target = out[row : row + step]
            slab = self._raw.take(target.shape, dtype)
            home.read_elements(key, start + row * width, slab)
            target.copy_(slab)

    def _read_quantised(self, part: Part, out: Tensor) -> None:
        assert self._block is not None
        home = self._homes[part.key]
        height, width = self._block[0], part.shape[1]
        scales = self._scale_rows(part)
        step = max(height, _SLAB // width // height * height)
        for row in range(0, len(out), step):
            slab = self._raw.take(out[row : row + step].shape, FP8)
            home.read_elements(part.key, row * width, slab)
            for first in range(0, len(slab), height):
                stored = slab[first : first + height]
                values = self._values.take(stored.shape, torch.float32).copy_(stored)
                values *= scales[(row + first) // height]
                out[row + first : row + first + height].copy_(values)

    def _scale_rows(self, part: Part) -> Tensor:
        """Scales of one FP8 matrix, spread over its columns: fp32 [block rows, columns]."""
        assert self._block is not None
        return self._stored_scales(part).repeat_interleave(self._block[1], dim=1)[
            :, : part.shape[1]
        ]

    def _stored_scales(self, part: Part) -> Tensor:
        home = self._homes[part.scale_key]
        scale = torch.empty(home.tensors[part.scale_key].shape, dtype=torch.float32)
        home.read_elements(part.scale_key, 0, scale)
        return scale


class _Scratch:
    """Memory kept between reads; taken and freed each time, it would fragment the heap."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of undefined content, valid until the next call."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(max(size, _SLAB), dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(*shape)
