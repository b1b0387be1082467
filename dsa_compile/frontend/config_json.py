"""``config.json`` of a model directory, as a dict."""

from pathlib import Path
from typing import Any

from dsa_compile.common.regular_files import read_regular
from dsa_compile.common.strict_json import loads_strictly
from dsa_compile.errors import ConfigError, shown


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model directory.

    Where it does not say how weights are quantised and ``hf_quant_config.json`` does, which
    ModelOpt writes beside it, that becomes its ``quantization_config``.

    Raises:
        ConfigError: no such directory or file, or not JSON.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ConfigError(f"{model_dir}: no such directory; give a Hugging Face model directory")
    try:
        config = _read_object(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; is this a Hugging Face model directory?") from None
    for name in ("rope_parameters", "rope_scaling", "quantization_config"):
        if not isinstance(config.get(name), dict | None):
            raise ConfigError(f"config.json: {name}={shown(config[name])} should be an object")
    if config.get("quantization_config") is None:
        config |= _beside(model_dir / "hf_quant_config.json")
    return config


def _beside(path: Path) -> dict[str, Any]:
    """The quantisation of weights that ModelOpt's file says, if it is there and says one."""
    try:
        said = _read_object(path).get("quantization")
    except FileNotFoundError:
        return {}
    if not isinstance(said, dict):
        raise ConfigError(f"{path}: quantization={shown(said)} should be an object")
    if said.get("quant_algo") is None:  # of caches alone, which a recipe chooses here
        return {}
    return {"quantization_config": {**said, "quant_method": f"modelopt ({path.name})"}}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; FileNotFoundError if there is no such file, else ConfigError."""
    try:
        found = loads_strictly(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found
