"""A model directory's weights: checked whole from the headers, then read a slab at a time."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.model_spec import ModelSpec
from dsa_compile.weights.canonical import ParameterInfo, canonical_parameters
from dsa_compile.weights.hashing import hash_files
from dsa_compile.weights.layout import Part, stored_parts
from dsa_compile.weights.materialize import write_expr
from dsa_compile.weights.plan import WeightEntry
from dsa_compile.weights.safetensors_file import SafetensorsFile, StoredTensor
from dsa_compile.weights.shard_index import read_shard_index

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_FP8 = torch.float8_e4m3fn
# Bytes of stored data held at once when they cannot be read straight into place.
_SLAB = 16 << 20
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


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
        _require(model_dir, [part.key for part in wanted], index)
        used = {part.key for part in wanted}
        used |= {part.scale_key for part in wanted if part.scale_key in index}
        homes = _open_homes(model_dir, used, index)
        block = spec.quantization.block if spec.quantization else None
        for part in wanted:
            _check_part(part, homes, block)
        unused = [key for key in index if key not in used]
        notes = _set_aside(model_dir, unused, spec, layers)
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
        holds one slab of the stored data.
        """
        assert tuple(out.shape) == self.shape(name), (name, out.shape)
        for part in self._parts[name]:
            if part.expert is None:
                self._read_part(part, out)
            else:
                self._read_part(part, out[part.expert].narrow(0, part.row, part.shape[0]))

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
        if stored.dtype == out.dtype and out.is_contiguous() and out.device.type == "cpu":
            home.read_rows(part.key, 0, out)
            return
        scales = self._scale_rows(part) if stored.dtype == _FP8 else None
        step = _slab_rows(stored, self._block if scales is not None else None)
        raw = torch.empty((min(step, stored.shape[0]), *stored.shape[1:]), dtype=stored.dtype)
        for start in range(0, stored.shape[0], step):
            slab = raw[: min(step, stored.shape[0] - start)]
            home.read_rows(part.key, start, slab)
            target = out[start : start + len(slab)]
            if scales is None:
                target.copy_(slab)
            else:
                _dequantise(slab, scales[start // self._block_rows :], self._block_rows, target)

    @property
    def _block_rows(self) -> int:
        assert self._block is not None
        return self._block[0]

    def _scale_rows(self, part: Part) -> Tensor:
        """Scales of one FP8 matrix, spread over its columns: fp32 [block rows, columns]."""
        assert self._block is not None
        home = self._homes[part.scale_key]
        stored = home.tensors[part.scale_key]
        scale = torch.empty(stored.shape, dtype=stored.dtype)
        home.read_rows(part.scale_key, 0, scale)
        return scale.repeat_interleave(self._block[1], dim=1)[:, : part.shape[1]]


def _dequantise(slab: Tensor, scales: Tensor, height: int, out: Tensor) -> None:
    for number, start in enumerate(range(0, len(slab), height)):
        rows = slice(start, start + height)
        out[rows].copy_(slab[rows].float().mul_(scales[number]))


def _slab_rows(stored: StoredTensor, block: tuple[int, int] | None) -> int:
    row_bytes = torch.Size(stored.shape[1:]).numel() * stored.dtype.itemsize
    rows = max(1, _SLAB // max(1, row_bytes))
    return rows if block is None else max(block[0], rows - rows % block[0])


def _require(model_dir: Path, keys: Iterable[str], index: Mapping[str, str]) -> None:
    missing = [key for key in keys if key not in index]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{model_dir}: the weights lack {missing[0]!r}{more}; "
            "is the download complete, and does config.json belong to it?"
        )


def _open_homes(
    model_dir: Path, used: Iterable[str], index: Mapping[str, str]
) -> dict[str, SafetensorsFile]:
    """Open the files that hold the ``used`` keys, and check them against the index."""
    names = {key: index[key] for key in used}
    opened: dict[str, SafetensorsFile] = {}
    for name in sorted(set(names.values())):
        path = model_dir / name
        if not path.exists():
            key = min(k for k, n in names.items() if n == name)
            raise CheckpointError(f"{path}: missing; it should hold {key!r} (download it again)")
        opened[name] = SafetensorsFile.open(path, CheckpointError)
        for key in opened[name].tensors:
            if key not in index:
                raise CheckpointError(f"{path}: holds {key!r}, which the index does not list")
            if index[key] != name:
                raise CheckpointError(
                    f"{path}: holds {key!r}, which the index places in {index[key]}; "
                    "a tensor must be in one file only"
                )
    for key, name in names.items():
        if key not in opened[name].tensors:
            raise CheckpointError(f"{model_dir / name}: lacks {key!r}, which the index places here")
    return {key: opened[name] for key, name in names.items()}


def _check_part(
    part: Part, homes: Mapping[str, SafetensorsFile], block: tuple[int, int] | None
) -> None:
    home = homes[part.key]
    stored = home.tensors[part.key]
    where = f"{home.path}: {part.key!r}"
    if stored.shape != part.shape:
        raise CheckpointError(
            f"{where} has shape {list(stored.shape)}, config.json asks for {list(part.shape)}"
        )
    if stored.dtype in _PLAIN:
        if part.scale_key in homes:
            raise CheckpointError(
                f"{homes[part.scale_key].path}: {part.scale_key!r} gives scales, "
                f"but the weight is plain {_short(stored.dtype)}"
            )
        return
    if stored.dtype != _FP8 or len(part.shape) != 2:
        allowed = "F32, BF16, F16" + (", or F8_E4M3 with scales" if len(part.shape) == 2 else "")
        raise CheckpointError(f"{where} is stored as {_short(stored.dtype)}; wanted {allowed}")
    if block is None:
        raise CheckpointError(f"{where} is FP8, but config.json has no quantization_config")
    if part.scale_key not in homes:
        raise CheckpointError(f"{where} is FP8, but its scales {part.scale_key!r} are missing")
    _check_scale(part, homes[part.scale_key], block)


def _check_scale(part: Part, home: SafetensorsFile, block: tuple[int, int]) -> None:
    scale = home.tensors[part.scale_key]
    where = f"{home.path}: {part.scale_key!r}"
    if scale.dtype != torch.float32:
        raise CheckpointError(f"{where} is stored as {_short(scale.dtype)}; scales must be F32")
    grid = tuple(-(-size // step) for size, step in zip(part.shape, block, strict=True))
    if scale.shape != grid:
        raise CheckpointError(
            f"{where} has shape {list(scale.shape)}, but {list(part.shape)} in blocks of "
            f"{list(block)} needs {list(grid)}"
        )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _set_aside(
    model_dir: Path, unused: Iterable[str], spec: ModelSpec, layers: Sequence[int]
) -> tuple[str, ...]:
    """Notes on what is skipped on purpose; raises CheckpointError for what should not be there."""
    first, last = spec.num_hidden_layers, spec.num_hidden_layers + spec.num_nextn_predict_layers
    skipped: dict[int, int] = {}
    unexpected = []
    for key in unused:
        match = _LAYER.match(key)
        layer = int(match[1]) if match else last
        if layer >= last or layer in layers:
            unexpected.append(key)
        elif layer >= first:
            skipped[layer] = skipped.get(layer, 0) + 1
    if unexpected:
        listed = ", ".join(sorted(unexpected)[:3]) + (", …" if len(unexpected) > 3 else "")
        raise CheckpointError(
            f"{model_dir}: {len(unexpected)} tensors do not belong to this model: {listed}; "
            "does config.json belong to these weights?"
        )
    return tuple(
        f"MTP layer {layer}: {count} tensors skipped" for layer, count in sorted(skipped.items())
    )
