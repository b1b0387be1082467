"""A model directory's weights: checked whole from the headers, then read a slab at a time."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.weights.block_fp8 import BLOCK, scale_shape
from dsa_compile.weights.canonical import ParameterInfo, canonical_parameters, is_router
from dsa_compile.weights.hashing import hash_files
from dsa_compile.weights.layout import Part, matrices, stored_parts
from dsa_compile.weights.materialize import write_expr
from dsa_compile.weights.mtp_copies import copies, require_equal
from dsa_compile.weights.plan import WeightEntry
from dsa_compile.weights.safetensors_file import SafetensorsFile
from dsa_compile.weights.set_aside import set_aside
from dsa_compile.weights.shard_index import read_shard_index
from dsa_compile.weights.stored import StoredReader
from dsa_compile.weights.validation import (
    check_part,
    is_quantized,
    open_homes,
    require_keys,
)
from dsa_compile.weights.windows import Window, bounded, sizes


@dataclass(frozen=True)
class CheckpointFile:
    """One weight file: its name relative to the model directory, bytes, SHA-256 of its header."""

    name: str
    size: int
    header_sha256: str


class Checkpoint:
    """Read access by canonical parameter name; made by :meth:`open`.

    Attributes:
        files: the files that hold the wanted layers, by name; others are never opened.
    """

    def __init__(
        self,
        model_dir: Path,
        parameters: Mapping[str, ParameterInfo],
        parts: Mapping[str, tuple[Part, ...]],
        homes: Mapping[str, SafetensorsFile],
        block: tuple[int, int] | None,
        unused: Collection[str] = (),
        copies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._unused = unused
        self._copies = copies
        self._model_dir = model_dir
        self._parameters = parameters
        self._parts = parts
        self._homes = homes
        self._reader = StoredReader(homes, block)
        files = {home.path: home for home in homes.values()}
        self.files = tuple(
            CheckpointFile(self._name(path), home.size, home.header_sha256)
            for path, home in sorted(files.items())
        )

    @classmethod
    def open(cls, model_dir: Path, spec: ModelSpec, layers: Sequence[int]) -> "Checkpoint":
        """Find and check every parameter of ``layers``, the embedding and the head.

        The weights may be one ``model.safetensors`` or shards with an index; experts fused or one
        matrix each; float8_e4m3fn with block scales, or plain fp32, bf16 or fp16. Only headers are
        read.

        Raises:
            CheckpointError: anything missing, repeated, truncated, or of another shape or dtype
                than ``spec`` says; names the file and the key.
        """
        model_dir = Path(model_dir)
        index = read_shard_index(model_dir)
        parameters = canonical_parameters(spec, layers)
        found = copies(spec, index) if spec.mtp_layer in layers else {}
        parameters |= {copy: parameters[original] for copy, original in found.items()}
        parts = {n: stored_parts(n, p.shape, index) for n, p in parameters.items()}
        wanted = [part for group in parts.values() for part in group]
        require_keys(model_dir, [part.key for part in wanted], index)
        used = {part.key for part in wanted}
        used |= {part.scale_key for part in wanted if part.scale_key in index}
        homes = open_homes(model_dir, used, index)
        block = spec.quantization.block if spec.quantization else None
        for part in wanted:
            check_part(part, homes, spec.quantization)
        unused = index.keys() - {part.key for part in wanted}
        unused -= {part.scale_key for part in wanted if is_quantized(part, homes)}
        return cls(model_dir, parameters, parts, homes, block, unused, found)

    def set_aside(
        self, spec: ModelSpec, layers: Sequence[int], ignored: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Decide about stored tensors that no weight needs; compiling does so, loading does not.

        Args:
            spec: of the model.
            layers: as it was opened for.
            ignored: patterns of names that are no reason to refuse the checkpoint.

        Returns:
            A note for each thing that is left out, such as a multi-token-prediction layer.

        Raises:
            CheckpointError: a tensor belongs to no part that a model of this kind has.
        """
        plain = {
            part.scale_key: self._homes[part.key].tensors[part.key].tag
            for parts in self._parts.values()
            for part in parts
            if part.scale_key in self._unused
        }
        return set_aside(self._model_dir, self._unused, plain, spec, layers, ignored)

    def require_equal_copies(self) -> None:
        """Check that the MTP layer's embedding and head, where they are stored, are the model's.

        Raises:
            CheckpointError: they differ.
        """
        for copy, original in self._copies.items():
            require_equal(self, copy, original)

    def rounded_routers(self, dtype: torch.dtype) -> tuple[str, ...]:
        """A note on the routers' matrices that lose something in ``dtype``, if any does.

        transformers keeps them in fp32 and saves them so; their values may be bf16 all the same.
        """
        names = [n for n, info in self._parameters.items() if is_router(n) and not info.keep_fp32]
        lost = 0
        for name in names:
            if self.stored_dtype(name).itemsize > dtype.itemsize:
                values = torch.empty(self.shape(name))
                self.read_into(name, values)
                lost += not torch.equal(values.to(dtype).float(), values)
        if not lost:
            return ()
        return (
            f"{lost} router matrices are stored in fp32 and rounded by this recipe: of random "
            "ones, 1.2 to 1.9 % of tokens chose other experts in a layer",
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter; raises CheckpointError if there is none of that name."""
        return self._parameter(name).shape

    def stored_dtype(self, name: str) -> torch.dtype:
        """Dtype on disk (of the first expert, where each is stored apart)."""
        self._parameter(name)
        key = self._parts[name][0].key
        return self._homes[key].tensors[key].dtype

    def read_into(self, name: str, out: Tensor, window: Window = ()) -> None:
        """Fill ``out`` (any strides, dtype or device) with a parameter, or a window of it.

        Only what the window shows is read, and only from the files that hold it. FP8 blocks are
        dequantised in fp32 and rounded once, to ``out.dtype``. Apart from ``out`` this takes a
        few megabytes, however large the parameter is. Not for several threads at once.
        """
        window = bounded(window, self.shape(name))
        assert tuple(out.shape) == sizes(window), (name, out.shape)
        for part in self._parts[name]:
            if part.expert is None:
                self._reader.read(part, window, out)
                continue
            experts, rows, columns = window
            first = max(rows.start, part.row)
            last = min(rows.stop, part.row + part.shape[0])
            if experts.start <= part.expert < experts.stop and first < last:
                target = out[part.expert - experts.start, first - rows.start : last - rows.start]
                mine = slice(first - part.row, last - part.row)
                self._reader.read(part, (mine, columns), target)

    def read_quantized(
        self,
        name: str,
        stacked: int,
        values: Tensor | None,
        scales: Tensor | None,
        window: Window = (),
    ) -> None:
        """Fill e4m3 ``values`` and fp32 ``scales``, where given, with a parameter in FP8 blocks.

        What is stored in blocks of 128×128 is copied; anything else is quantised so.

        Args:
            name: of the parameter, a matrix ``[N, K]`` or experts ``[E, N, K]``.
            stacked: matrices one above the other in N that are quantised each on its own.
            values: of the parameter's shape or the window's, any strides or device.
            scales: of :func:`~dsa_compile.weights.block_fp8.scale_shape`, likewise.
            window: of the values or of the scales, whichever are given; all of both if empty. Only
                what it shows is read, in whole blocks.

        Raises:
            CheckpointError: see :meth:`check_blocks`.
        """
        assert not window or values is None or scales is None
        shape = self.shape(name)
        for out, block, size in (
            (values, 1, shape),
            (scales, BLOCK, scale_shape(shape, stacked)),
        ):
            if out is None:
                continue
            shown = bounded(window, size)
            for part in self._parts[name]:
                for matrix in matrices(part, stacked):
                    found = matrix.shown(shown, block)
                    if found is not None:
                        place, inner = found
                        target = out[place].view(out[place].shape[-2:])
                        pair = (target, None) if out is values else (None, target)
                        self._reader.read_matrix(part, matrix, inner, *pair)

    def check_blocks(self, name: str) -> None:
        """Refuse a parameter that :meth:`read_quantized` could not give, before anything is read.

        Raises:
            CheckpointError: stored in blocks of another size than 128×128.
        """
        self._parameter(name)
        for part in self._parts[name]:
            self._reader.check_blocks(part)

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
