"""The models that can be compiled, one literal entry each: classes of transformers, and facts.

An entry says how layers of each kind are distinguished in the configuration, which module of
:mod:`dsa_compile.frontend.modules` traces each, and the facts that passes count by.
"""

import copy
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import (
    AXK2Config,
    AXK2ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    PreTrainedConfig,
)
from transformers.models.axk2.modeling_axk2 import AXK2RotaryEmbedding
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32RotaryEmbedding
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

from dsa_compile.errors import ConfigError, shown
from dsa_compile.facts.model_spec import LARGEST, LayerKind, ModelSpec
from dsa_compile.frontend.architecture import TAKES, Architecture, Traced, TracedLayer
from dsa_compile.frontend.config_fields import (
    check_dtypes,
    check_fields,
    check_repeated,
    check_rope_numbers,
)
from dsa_compile.frontend.model_checks import MODEL_TYPES, check_model_type, text_part
from dsa_compile.frontend.modules import ReusingLayer, SelectingLayer

try:
    from dsa_compile.frontend.mistral_large4 import MISTRAL_LARGE4
except ImportError:  # a transformers without it
    MISTRAL_LARGE4 = None  # type: ignore[assignment]

_SELECTING = Traced(SelectingLayer, TAKES, ("hidden", "selected"))
_REUSING = Traced(ReusingLayer, (*TAKES, "selected"), ("hidden",))

# What the configuration lists for a layer: its MLP, and where it has its selection from.
_DENSE, _SPARSE = {"mlp_layer_types": "dense"}, {"mlp_layer_types": "sparse"}
_FULL, _SHARED = {"indexer_types": "full"}, {"indexer_types": "shared"}

DEEPSEEK_V32 = Architecture(
    model_type="deepseek_v32",
    config=DeepseekV32Config,
    model=DeepseekV32ForCausalLM,
    rotary=DeepseekV32RotaryEmbedding,
    layers=(
        TracedLayer(LayerKind("dense", mlp="dense"), _DENSE),
        TracedLayer(LayerKind("moe", mlp="experts"), _SPARSE),
    ),
    index_rope_interleaved=False,
)

GLM_MOE_DSA = Architecture(
    model_type="glm_moe_dsa",
    config=GlmMoeDsaConfig,
    model=GlmMoeDsaForCausalLM,
    rotary=GlmMoeDsaRotaryEmbedding,
    layers=(
        TracedLayer(LayerKind("dense", "dense"), {**_DENSE, **_FULL}, _SELECTING),
        TracedLayer(LayerKind("moe", "experts"), {**_SPARSE, **_FULL}, _SELECTING),
        TracedLayer(LayerKind("dense_reuse", "dense", False), {**_DENSE, **_SHARED}, _REUSING),
        TracedLayer(LayerKind("moe_reuse", "experts", False), {**_SPARSE, **_SHARED}, _REUSING),
    ),
    index_rope_interleaved=True,
    extra_fields=(
        *("num_experts", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
        "index_share_for_mtp_iteration",
    ),
)

AXK2 = Architecture(
    model_type="axk2",
    config=AXK2Config,
    model=AXK2ForCausalLM,
    rotary=AXK2RotaryEmbedding,
    layers=DEEPSEEK_V32.layers,
    index_rope_interleaved=False,
    when_null={"n_group": 1, "topk_group": 1},  # all experts are of one group
    facts={"output_gate": True},
    extra_fields=("first_k_dense_replace",),
)

ARCHITECTURES: dict[str, Architecture] = {
    entry.model_type: entry
    for entry in (DEEPSEEK_V32, GLM_MOE_DSA, AXK2, MISTRAL_LARGE4)
    if entry is not None
}
"""Architectures that the installed transformers has, by model type."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a configuration, by its model type.

    Raises:
        ConfigError: see :func:`~dsa_compile.frontend.model_checks.check_model_type`; or the
            installed transformers lacks its classes.
    """
    model_type = check_model_type(config)
    if model_type not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: transformers {transformers.__version__} has no {model_type!r} "
            f"({MODEL_TYPES[model_type]}); install a newer one"
        )
    return ARCHITECTURES[model_type]


def load_config(raw: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration as transformers understands it: defaults filled in, old names mapped.

    Begin and end tokens are those that ``raw`` names, without defaults. If the model has vision,
    this is the part for text.

    Args:
        raw: ``config.json``.

    Raises:
        ConfigError: another architecture, a field that transformers would ignore, or transformers
            refuses it.
    """
    architecture = architecture_of(raw)
    raw = text_part(raw)
    check_fields(raw, architecture.config, architecture.extra_fields)
    check_dtypes(raw)
    check_rope_numbers(raw)
    for name, largest in LARGEST.items():  # transformers makes a list of as many entries
        if isinstance(size := raw.get(name), int | float) and size > largest:
            raise ConfigError(f"config.json: {name}={shown(size)} must be from 1 to {largest}")
    # a class's own end token may be any token of another vocabulary
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id"), None)
    try:
        made = architecture.config(**copy.deepcopy(tokens | dict(raw)))  # it changes its arguments
    # the strict dataclass raises its own classes and, from rope validation, KeyError
    except Exception as error:
        raise refused(error) from None
    check_repeated(raw, made.to_dict())
    return made


def refused(error: Exception) -> ConfigError:
    """Error to raise where classes of transformers refuse a configuration."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"config.json: transformers refuses it: {reason}")


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """The geometry of the dict form of a configuration as transformers understands it.

    Raises:
        ConfigError: another architecture, a missing field, or an unsupported value.
    """
    return architecture_of(config).spec(config)
