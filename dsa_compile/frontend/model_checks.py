"""Checks of a model that need no transformers."""

from collections.abc import Iterator, Mapping
from typing import Any

from dsa_compile.errors import ConfigError, UserError, shown
from dsa_compile.facts.config import TARGETS
from dsa_compile.facts.formats import FP32, RECIPES

MODEL_TYPES = {
    "deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-5, 5.1, 5.2 and 5.3",
    "axk2": "A.X-K2",
    "mistral_large4_text": "Mistral-Large-4, for text",
}
"""The model types that are taken, as ``config.json`` has them, and what people call each."""

# No pass quantises what comes out of a gated norm, nor rows of a cache without a rotated key.
_NARROW = {"axk2": ("fp32", "bf16"), "mistral_large4_text": ("fp32", "bf16")}

# No kernel has been run on rows of a cache without a rotated key.
_TARGETS = {"mistral_large4_text": ("cpu",)}

NOT_YET = {
    "hy_v4": "HY-V4: attention sinks, hyper-connections between layers, a clamp in its experts",
    "dots3_note_text": "dots3-note: layers with a sliding window, wider shared experts",
    "deepseek_v4": "DeepSeek-V4: caches of compressed keys, sliding windows, hyper-connections",
    "glm5_next_text": "GLM-5.3-Flash: linear attention, pooled index keys, hyper-connections",
    "qwen4_exp_text": "Qwen4-Exp: linear attention, index keys in blocks, n-gram embeddings",
    "minimax_m3_vl_text": "MiniMax-M3: attention without a latent, selection of blocks of keys",
}
"""Model types with sparse attention that are not taken: what people call each, what is missing."""

# The whole of a model with vision or sound, by its part for text.
_WHOLES = ("dots3_note", "glm5_next", "mistral_large4", "qwen4_exp", "minimax_m3_vl")
# Fields of such a whole that matter to its parts for images alone, or to no result.
_BESIDE_TEXT = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "model_type"),
        *("vision_config", "image_token_index", "image_token_id", "projector_hidden_act"),
        *("vision_feature_layer", "multimodal_projector_bias", "spatial_merge_size"),
    }
)


def check_model_type(config: Mapping[str, Any]) -> str:
    """The model type of a configuration.

    Raises:
        ConfigError: one that is not taken. A model type that is nearly one of these is not: its
            configuration would be understood, and another model computed.
    """
    found = config.get("model_type")
    part = f"{found}_text" if found in _WHOLES else found
    if isinstance(part, str) and part in MODEL_TYPES:
        return part
    if isinstance(part, str) and part in NOT_YET:
        title, _, missing = NOT_YET[part].partition(": ")
        raise ConfigError(
            f"config.json: model_type={found!r} ({title}) is not supported yet; what it has and "
            f"dsa-compile lacks: {missing}"
        )
    taken = ", ".join(f"{name!r} ({title})" for name, title in MODEL_TYPES.items())
    raise ConfigError(
        f"config.json: model_type={found!r} is not supported; dsa-compile takes {taken}"
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the part for text, of a model with vision; else ``config`` itself.

    Raises:
        ConfigError: there is none, or a field beside it says something else.
    """
    whole = config.get("model_type")
    if whole not in _WHOLES:
        return config
    text = config.get("text_config")
    wanted = f"{whole}_text"
    if not isinstance(text, dict) or text.get("model_type", wanted) != wanted:
        raise ConfigError(
            f"config.json: text_config={shown(text)} should be an object, of model_type={wanted!r}"
        )
    about_weights = {"quantization_config": config.get("quantization_config")}
    for name, value in config.items():
        beside = name in _BESIDE_TEXT or name in ("text_config", *about_weights)
        if beside or name.startswith("_"):
            continue
        if value is not None and value != text.get(name, value if value is False else None):
            raise ConfigError(
                f"config.json: {name}={shown(value)} beside text_config is not supported"
            )
    return {**text, "model_type": wanted} | {n: v for n, v in about_weights.items() if v}


def recipes_of(model_type: str) -> tuple[str, ...]:
    """The recipes that a model type can be compiled with."""
    return _NARROW.get(model_type, tuple(RECIPES))


def fitting_recipe(config: Mapping[str, Any]) -> tuple[str, str]:
    """The recipe that suits a checkpoint on a GPU, and why.

    Args:
        config: of the model.

    Raises:
        ConfigError: a model type that is not taken.
    """
    recipes = recipes_of(check_model_type(config))
    stored = config.get("quantization_config") or {}
    if stored.get("quant_method") != "fp8":
        return "bf16", "its weights are not quantised"
    if "fp8" in recipes:
        return "fp8", "its weights are blocks of FP8"
    return "bf16", "this model type has no recipe with FP8"


def check_recipe(model_type: str, recipe: str) -> None:
    """Raise UserError for a recipe that a model type cannot be compiled with."""
    recipes = recipes_of(model_type)
    if recipe not in recipes:
        raise UserError(
            f"recipe {recipe!r} is not supported for model_type={model_type!r}; choose one of "
            f"{', '.join(recipes)}"
        )


def check_expert_widths(recipe: str, **sizes: int) -> None:
    """Raise ConfigError for a width of experts that torch's grouped product does not take.

    Args:
        recipe: of the compilation.
        sizes: fields of the configuration: elements in a row that the product reads.
    """
    for name, size in sizes.items():
        if RECIPES[recipe].compute != FP32 and size % 8:
            raise ConfigError(
                f"config.json: {name}={size}: recipe {recipe} takes experts whose rows are "
                "multiples of 8, as torch's product of groups does; compile with --recipe fp32"
            )


def check_target(model_type: str, target: str) -> None:
    """Raise UserError for a target that a model type cannot be compiled for."""
    targets = _TARGETS.get(model_type, TARGETS)
    if target not in targets:
        raise UserError(
            f"target {target!r} is not supported for model_type={model_type!r}, only "
            f"{', '.join(targets)}: its layers without RoPE need kernels for rows of latents alone"
        )


def model_listing() -> Iterator[str]:
    """Lines that name the models that are taken, and those that are not yet, with the reasons."""
    for model_type, title in MODEL_TYPES.items():
        yield f"{model_type:<20} {title}; recipes {', '.join(recipes_of(model_type))}"
    yield ""
    yield "not yet, for what dsa-compile lacks:"
    for model_type, text in NOT_YET.items():
        yield f"{model_type:<20} {text}"


def check_layers(keep: tuple[int, int] | None, count: int) -> tuple[int, int]:
    """The first and the last layer to keep of a model with so many.

    Raises:
        UserError: ``keep`` lies outside the model.
    """
    first, last = keep if keep is not None else (0, count - 1)
    if not 0 <= first <= last < count:
        raise UserError(f"--layers {first}-{last}: the model has layers 0-{count - 1}")
    return first, last
