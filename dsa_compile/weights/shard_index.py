"""Shard index: which file of a model directory holds which tensor, with one file or several."""

from pathlib import Path, PurePosixPath

from dsa_compile.common.regular_files import read_regular
from dsa_compile.common.strict_json import loads_strictly
from dsa_compile.errors import CheckpointError, shown
from dsa_compile.weights.safetensors_file import SafetensorsFile

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_shard_index(model_dir: Path) -> dict[str, str]:
    """Map each tensor's key to the name of its file, relative to ``model_dir``.

    A lone ``model.safetensors`` wins over an index, as in transformers. The files an index names
    are not opened.

    Raises:
        CheckpointError: neither is there, or the index is malformed, names a key twice, or names a
            file outside ``model_dir``.
    """
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if single.exists():
        header = SafetensorsFile.open(single, CheckpointError)
        return dict.fromkeys(header.tensors, SINGLE_FILE)
    if not index.exists():
        raise CheckpointError(
            f"{model_dir}: no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there "
            "(--weights none compiles the structure alone)"
        )
    try:
        data = loads_strictly(read_regular(index).decode())
    except OSError as problem:
        raise CheckpointError(f"{index}: cannot be read ({problem.strerror})") from None
    except ValueError as problem:
        raise CheckpointError(f"{index}: not a valid index ({problem})") from None
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: it has no weight_map; download the model again")
    for key, name in weight_map.items():
        _check_file_name(index, key, name)
    return weight_map


def _check_file_name(index: Path, key: str, name: object) -> None:
    # The name alone is judged: in a hub cache the file is a link that leads elsewhere, rightly.
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        raise CheckpointError(
            f"{index}: {shown(key)} is said to be in {shown(name)}, no .safetensors file"
        )
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"{index}: {shown(key)} is said to be in {shown(name)}, which is outside the model "
            "directory"
        )
