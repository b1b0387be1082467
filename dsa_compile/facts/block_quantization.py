"""Quantisation of a checkpoint's weights, from ``quantization_config`` of its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.errors import ConfigError, shown
from dsa_compile.facts.config_values import LARGEST_SIZE

# The only value of a field, and what its absence means.
_ONLY = {
    "fmt": ("e4m3", ""),
    "activation_scheme": ("dynamic", ""),  # static scales would be in the checkpoint
    "scale_fmt": ("ue8m0", " (fp32 scales)"),
}


@dataclass(frozen=True)
class BlockQuantization:
    """Weights stored as float8_e4m3 with one fp32 ``weight_scale_inv`` per block.

    ``block`` is (rows, columns); the grid of scales is rounded up at the edges. ``scale_fmt`` is
    ``"ue8m0"`` where the model was trained with scales that are powers of two, so that activations
    must be quantised with such scales as well.
    """

    block: tuple[int, int]
    scale_fmt: str | None = None


def quantization_of(config: Mapping[str, Any]) -> BlockQuantization | None:
    """The block format of a checkpoint's weights, or None where they are not quantised.

    Raises:
        ConfigError: they are quantised in another format.
    """
    raw = config.get("quantization_config")
    if raw is None:
        return None
    block = raw.get("weight_block_size")
    sizes = block if isinstance(block, list | tuple) else ()
    whole = all(type(size) is int and 1 <= size <= LARGEST_SIZE for size in sizes)
    if raw.get("quant_method") != "fp8" or len(sizes) != 2 or not whole:
        raise ConfigError(
            "config.json: quantization_config must be quant_method 'fp8' with a two-element "
            f"weight_block_size (DeepSeek's block format), found {shown(raw)}"
        )
    for name, (only, absent) in _ONLY.items():
        if raw.get(name) not in (None, only):
            raise ConfigError(
                f"config.json: quantization_config.{name} must be {only!r} or absent{absent}, "
                f"found {shown(raw[name])}"
            )
    return BlockQuantization((sizes[0], sizes[1]), raw.get("scale_fmt"))
