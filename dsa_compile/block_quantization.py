"""Quantisation of a checkpoint's weights, from ``quantization_config`` of its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.config_values import LARGEST_SIZE
from dsa_compile.errors import ConfigError, shown


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
    scale_fmt = raw.get("scale_fmt")
    if scale_fmt not in (None, "ue8m0"):
        raise ConfigError(
            "config.json: quantization_config.scale_fmt must be 'ue8m0' or absent (fp32 scales), "
            f"found {shown(scale_fmt)}"
        )
    return BlockQuantization((sizes[0], sizes[1]), scale_fmt)
