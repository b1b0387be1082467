"""Values of a configuration, with the type that they must have."""

import math
from collections.abc import Mapping
from typing import Any

from dsa_compile.errors import ConfigError, shown

LARGEST_SIZE = 2**31 - 1
"""Positions and cache rows are int32, and nothing else comes near."""


def field_of(config: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """The value of a field of one of the given types.

    Raises:
        ConfigError: it is missing or of another type.
    """
    if name not in config:
        raise ConfigError(f"config.json: {name} is missing")
    value = config[name]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    # bool is an int to Python, never to a configuration
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in kinds)
        raise ConfigError(f"config.json: {name}={shown(value)} should be {names}")
    return value


def number_of(config: Mapping[str, Any], name: str) -> float:
    """A positive number.

    Raises:
        ConfigError: it is missing or anything else.
    """
    try:
        value = float(field_of(config, name, (int, float)))
    except OverflowError:  # a whole number beyond any float
        value = math.inf
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"config.json: {name}={value} must be a positive number")
    return value
