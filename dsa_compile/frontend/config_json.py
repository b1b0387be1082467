"""``config.json`` of a model directory, as a dict."""

from pathlib import Path
from typing import Any

from dsa_compile.common.regular_files import read_regular
from dsa_compile.common.strict_json import loads_strictly
from dsa_compile.errors import ConfigError, shown


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """Read ``config.json`` of a model directory.

    Raises:
        ConfigError: no such directory or file, or not JSON.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ConfigError(f"{model_dir}: no such directory; give a Hugging Face model directory")
    try:
        config = loads_strictly(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; is this a Hugging Face model directory?") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # not JSON, not UTF-8, or an integer of thousands of digits
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(config).__name__}")
    for name in ("rope_parameters", "rope_scaling", "quantization_config"):
        if not isinstance(config.get(name), dict | None):
            raise ConfigError(f"config.json: {name}={shown(config[name])} should be an object")
    return config
