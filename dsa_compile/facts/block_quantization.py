"""Quantisation of a checkpoint's weights, from ``quantization_config`` of its configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.errors import ConfigError, shown
from dsa_compile.facts.config_values import LARGEST_SIZE

# Fields of quant_method "fp8" on which it depends how weights are stored, with the values that are
# taken. Absent or null means the first, as in DeepSeek's checkpoints and in transformers.
_TAKEN = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),  # static scales would be in the checkpoint
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
}
# Fields by which people know a format, wherever they are in its description.
_TELLING = frozenset(
    {
        *("quant_method", "quant_algo", "format", "fmt", "bits", "num_bits", "type", "dtype"),
        *("strategy", "qscheme", "group_size", "weight_block_size"),
    }
)
# How the scales may be stored, as safetensors names it: what becomes fp32 without rounding.
_SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
_EXPONENTS = ("U8",)  # the bytes of F8_E8M0, where scales are said to be powers of two


@dataclass(frozen=True)
class BlockQuantization:
    """Weights stored as float8_e4m3 with one ``weight_scale_inv`` per block.

    ``block`` is (rows, columns); the grid of scales is rounded up at the edges. ``scale_fmt`` is
    ``"ue8m0"`` where the model was trained with scales that are powers of two, so that activations
    must be quantised with such scales as well.
    """

    block: tuple[int, int]
    scale_fmt: str | None = None

    @property
    def scale_types(self) -> tuple[str, ...]:
        """Types that the scales may be stored in, as safetensors names them."""
        return _SCALE_TYPES + (_EXPONENTS if self.scale_fmt == "ue8m0" else ())


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
            f"config.json: quantization_config with {_told(raw)} is not supported, only "
            "quant_method 'fp8' with a two-element weight_block_size (DeepSeek's block format)"
        )
    for name, taken in _TAKEN.items():
        if raw.get(name) is not None and raw[name] not in taken:
            raise ConfigError(
                f"config.json: quantization_config.{name} must be "
                f"{' or '.join(map(repr, taken))} or absent, found {shown(raw[name])}"
            )
    powers = raw.get("scale_fmt") == "ue8m0"
    return BlockQuantization((sizes[0], sizes[1]), "ue8m0" if powers else None)


def _told(raw: Mapping[str, Any]) -> str:
    """What tells a format from others, its method first; not the lists of layers."""
    found = [f"quant_method={shown(raw.get('quant_method'))}"]
    parts = [raw]
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                parts.append(value)
            elif name in _TELLING and value is not None:
                found.append(f"{name}={shown(value, 40)}")
    return ", ".join(list(dict.fromkeys(found))[:10])
