"""Validation of a checkpoint's keys, files and headers, before a byte of its data is read."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.block_quantization import BlockQuantization
from dsa_compile.weights.dtypes import SAFETENSORS_TAGS
from dsa_compile.weights.layout import Part
from dsa_compile.weights.safetensors_file import SafetensorsFile

FP8 = torch.float8_e4m3fn
_PLAIN = ("F32", "BF16", "F16")


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


def is_quantized(part: Part, homes: Mapping[str, SafetensorsFile]) -> bool:
    """Whether a stored tensor is in FP8, and so has scales."""
    return homes[part.key].tensors[part.key].tag == SAFETENSORS_TAGS[FP8]


def check_part(
    part: Part, homes: Mapping[str, SafetensorsFile], quantization: BlockQuantization | None
) -> None:
    """Raise CheckpointError unless a stored tensor has its shape, a dtype we read, and its scales.

    ``quantization`` is what config.json says of it, None if nothing.
    """
    home = homes[part.key]
    stored = home.tensors[part.key]
    where = f"{home.path}: {part.key!r}"
    if stored.shape != part.shape:
        raise CheckpointError(
            f"{where} has shape {list(stored.shape)}, config.json asks for {list(part.shape)}"
        )
    if stored.tag in _PLAIN:
        return
    if not is_quantized(part, homes) or len(part.shape) != 2:
        allowed = ", ".join(_PLAIN)
        allowed += ", or F8_E4M3 with scales" if len(part.shape) == 2 else ""
        raise CheckpointError(f"{where} is stored as {stored.tag}; wanted {allowed}")
    if quantization is None:
        raise CheckpointError(f"{where} is FP8, but config.json has no quantization_config")
    if part.scale_key not in homes:
        raise CheckpointError(f"{where} is FP8, but its scales {part.scale_key!r} are missing")
    _check_scale(part, homes[part.scale_key], quantization)


def _check_scale(part: Part, home: SafetensorsFile, quantization: BlockQuantization) -> None:
    scale = home.tensors[part.scale_key]
    where = f"{home.path}: {part.scale_key!r}"
    types = quantization.scale_types
    if scale.tag not in types:
        raise CheckpointError(
            f"{where} is stored as {scale.tag}; scales must be {', '.join(types)}"
        )
    block = quantization.block
    grid = part.scale_grid(block)
    if scale.shape != grid:
        raise CheckpointError(
            f"{where} has shape {list(scale.shape)}, but {list(part.scaled or part.shape)} in "
            f"blocks of {list(block)} needs {list(grid)}"
        )
    if part.scaled and part.shape[0] % block[0]:
        raise CheckpointError(
            f"{where} gives scales of gate and up projections together, whose {part.shape[0]} rows "
            f"are no whole blocks of {block[0]}"
        )
