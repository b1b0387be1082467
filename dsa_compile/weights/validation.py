"""Validation of a checkpoint's keys, files and headers, before a byte of its data is read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.weights.dtypes import dtype_name
from dsa_compile.weights.layout import Part
from dsa_compile.weights.safetensors_file import SafetensorsFile

FP8 = torch.float8_e4m3fn
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


def require_keys(model_dir: Path, keys: Iterable[str], index: Mapping[str, str]) -> None:
    """Raise CheckpointError unless ``index`` (key -> file name) has all ``keys``."""
    missing = [key for key in keys if key not in index]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{model_dir}: the weights lack {missing[0]!r}{more}; "
            "is the download complete, and does config.json belong to it?"
        )


def open_homes(
    model_dir: Path, used: Iterable[str], index: Mapping[str, str]
) -> dict[str, SafetensorsFile]:
    """Open the files that hold the ``used`` keys: key -> file.

    Raises:
        CheckpointError: a file is missing or damaged, or holds other keys than ``index`` says.
    """
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


def check_part(
    part: Part, homes: Mapping[str, SafetensorsFile], block: tuple[int, int] | None
) -> None:
    """Raise CheckpointError unless a stored tensor has its shape, a dtype we read, and its scales.

    ``block`` is the size of quantisation blocks, None where config.json names none.
    """
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
                f"but the weight is plain {dtype_name(stored.dtype)}"
            )
        return
    if stored.dtype != FP8 or len(part.shape) != 2:
        allowed = "F32, BF16, F16" + (", or F8_E4M3 with scales" if len(part.shape) == 2 else "")
        raise CheckpointError(f"{where} is stored as {dtype_name(stored.dtype)}; wanted {allowed}")
    if block is None:
        raise CheckpointError(f"{where} is FP8, but config.json has no quantization_config")
    if part.scale_key not in homes:
        raise CheckpointError(f"{where} is FP8, but its scales {part.scale_key!r} are missing")
    _check_scale(part, homes[part.scale_key], block)


def _check_scale(part: Part, home: SafetensorsFile, block: tuple[int, int]) -> None:
    scale = home.tensors[part.scale_key]
    where = f"{home.path}: {part.scale_key!r}"
    if scale.dtype != torch.float32:
        raise CheckpointError(f"{where} is stored as {dtype_name(scale.dtype)}; scales must be F32")
    grid = tuple(-(-size // step) for size, step in zip(part.shape, block, strict=True))
    if scale.shape != grid:
        raise CheckpointError(
            f"{where} has shape {list(scale.shape)}, but {list(part.shape)} in blocks of "
            f"{list(block)} needs {list(grid)}"
        )


def set_aside(
    model_dir: Path, unused: Iterable[str], spec: ModelSpec, layers: Sequence[int]
) -> tuple[str, ...]:
    """Notes on what is skipped on purpose; raises CheckpointError for what should not be there."""
    first, last = spec.num_hidden_layers, spec.num_hidden_layers + spec.num_nextn_predict_layers
    skipped: dict[int, int] = {}
    beside = 0
    unexpected = []
    for key in unused:
        if key.startswith(spec.other_parts):
            beside += 1
            continue
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
    notes = (f"{beside} tensors beside the text model skipped",) if beside else ()
    return notes + tuple(
        f"MTP layer {layer}: {count} tensors skipped" for layer, count in sorted(skipped.items())
    )
