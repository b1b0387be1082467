"""Fields of ``config.json`` that transformers passes over, although a model may depend on them.

Classes of transformers keep whatever fields they are given, and their models compute what they have
code for. A checkpoint whose configuration has a further field may be of another model.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedConfig

from dsa_compile.errors import ConfigError, shown
from dsa_compile.facts.config_values import number_of
from dsa_compile.facts.model_spec import CHECKED_FIELDS

# Names of older versions, bookkeeping, training, and how it is generated: no logits depend on them.
_WITHOUT_EFFECT = frozenset(
    {
        *("model_type", "auto_map", "torch_dtype", "torchscript", "use_return_dict", "rope_theta"),
        *("rope_scaling", "output_attentions", "attn_implementation", "tokenizer_class"),
        *("ep_size", "pretraining_tp", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef"),
        *("do_sample", "temperature", "top_k", "top_p", "max_length", "unsloth_version"),
        *("num_labels", "max_seq_len", "max_batch_size"),
    }
)
# Fields that every class of transformers reads and none declares.
_READ = frozenset({"original_max_position_embeddings"})
# Likewise, and no model here takes another value of them than the one given, or null.
_ONLY: dict[str, Any] = {
    "partial_rotary_factor": 1,
    "per_layer_config": None,
    "mtp_layer_types": None,
}
# What DeepSeek's own code calls what transformers calls otherwise: such fields only repeat it.
_NATIVE = {
    "dim": "hidden_size",
    "inter_dim": "intermediate_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_dense_layers": "first_k_dense_replace",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "n_expert_groups": "n_group",
    "n_limited_groups": "topk_group",
    "route_scale": "routed_scaling_factor",
    "score_func": "scoring_func",
    "original_seq_len": "original_max_position_embeddings",
    "rope_factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "scale_fmt": "scale_fmt",  # of quantization_config
}
# Those whose frequencies do not depend on the length of the sequence.
_ROPE_TYPES = ("default", "yarn")
_ROPE_NUMBERS = frozenset(
    {
        *("rope_theta", "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    }
)
_MAY_BE_ZERO = frozenset({"mscale", "mscale_all_dim"})  # which then have no effect
_ROPE_FIELDS = _ROPE_NUMBERS | {"type", "rope_type", "truncate"}


def check_fields(
    raw: Mapping[str, Any], config: type[PreTrainedConfig], extra: Iterable[str]
) -> None:
    """Refuse fields that neither ``config`` nor our own checks read, but those that are null.

    Args:
        raw: ``config.json``.
        config: class of the configuration.
        extra: fields that it reads but does not declare.

    Raises:
        ConfigError: names such a field.
    """
    known = {field.name for field in fields(config)}
    known |= {*config.attribute_map, *extra, *CHECKED_FIELDS, *_WITHOUT_EFFECT, *_READ, *_NATIVE}
    for name, only in _ONLY.items():
        if raw.get(name) not in (None, only):
            raise ConfigError(f"config.json: {name}={shown(raw[name])} is not supported")
    given = {name: value for name, value in raw.items() if value is not None}
    unknown = [n for n in given if n not in {*known, *_ONLY} and not n.startswith("_")]
    if unknown:
        listed = ", ".join(f"{name}={shown(given[name], 40)}" for name in unknown)
        them = "it" if len(unknown) == 1 else "them"
        raise ConfigError(
            f"config.json: transformers would ignore {listed}, which its {raw['model_type']} has "
            f"no code for; delete {them} if no result depends on {them}"
        )


def check_repeated(raw: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse a field, under its name in DeepSeek's own code, that contradicts another field.

    Args:
        raw: ``config.json``.
        config: the dict form of a configuration as transformers understands it.

    Raises:
        ConfigError: names both fields.
    """
    kinds = [*config["mlp_layer_types"], "sparse"]
    quantization = raw.get("quantization_config") or raw
    meant = {"scoring_func": "sigmoid", **config, **(config.get("rope_parameters") or {})}
    meant["first_k_dense_replace"] = kinds.index("sparse")
    meant["scale_fmt"] = quantization.get("scale_fmt")
    for name, other in _NATIVE.items():
        if raw.get(name) is not None and raw[name] != meant.get(other):
            raise ConfigError(
                f"config.json: {name}={shown(raw[name])} differs from {other}="
                f"{shown(meant.get(other))}, which is what transformers computes with"
            )


def check_dtypes(raw: Mapping[str, Any]) -> None:
    """Refuse a dtype that torch does not have; transformers takes any attribute of torch for one.

    Raises:
        ConfigError: names the field.
    """
    for name in ("dtype", "torch_dtype"):
        value = raw.get(name)
        known = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
        if value is not None and not known:
            raise ConfigError(f'config.json: {name}={shown(value)} is no dtype; write "bfloat16"')


def check_rope_numbers(raw: Mapping[str, Any]) -> None:
    """Refuse parameters of RoPE with which transformers would compute no numbers.

    Args:
        raw: ``config.json``.

    Raises:
        ConfigError: names the field.
    """
    parts = (raw.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for part in (raw, *parts):
        for name in sorted(_ROPE_NUMBERS & part.keys()):
            absent = part[name] is None or (name in _MAY_BE_ZERO and part[name] == 0)
            if not absent:
                number_of(part, name)


def check_rope(config: Mapping[str, Any]) -> None:
    """Refuse a scaling of RoPE that is not taken, or a parameter of it that has no effect.

    Args:
        config: the dict form of a configuration as transformers understands it.

    Raises:
        ConfigError: names the type or the parameter.
    """
    rope = config.get("rope_parameters") or {}
    found = rope.get("rope_type", "default")
    if not isinstance(found, str) or found not in _ROPE_TYPES:
        raise ConfigError(
            f"config.json: rope_type={shown(found)} is not supported, only "
            f"{' and '.join(_ROPE_TYPES)}"
        )
    if found == "yarn" and rope.get("factor") is None:
        raise ConfigError("config.json: rope_type='yarn' needs a factor, a positive number")
    for name in sorted(set(rope) - _ROPE_FIELDS):
        if name in _ONLY and rope[name] in (None, _ONLY[name]):
            continue
        if name in _ONLY or isinstance(rope[name], dict):  # a dict: for layers of one type
            raise ConfigError(
                f"config.json: rope_parameters with {name}={shown(rope[name])} is not supported"
            )
        raise ConfigError(
            f"config.json: rope_parameters has {shown(name)}={shown(rope[name])}, which its model "
            "in transformers would ignore; delete it if no result depends on it"
        )
