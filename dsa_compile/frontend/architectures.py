"""The models that are taken, one literal entry each: classes of transformers, and what they are.

An entry says how layers of each kind are distinguished in the configuration, which module of
:mod:`dsa_compile.frontend.modules` traces each, and the facts that passes count by.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
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
from dsa_compile.frontend.config_fields import check_dtypes, check_fields, check_rope
from dsa_compile.frontend.model_checks import check_model_type
from dsa_compile.frontend.modules import (
    Draft,
    Embed,
    Head,
    Layer,
    ReusingLayer,
    SelectingLayer,
)
from dsa_compile.model_spec import LARGEST, LayerKind, ModelSpec


@dataclass(frozen=True)
class Traced:
    """A part of the reference model as a region.

    Attributes:
        module: makes the module to trace of the model, or of one of its layers.
        inputs: names of what it takes; :mod:`dsa_compile.frontend.build` has their shapes.
        outputs: names of what it returns.
    """

    module: Callable[[Any], torch.nn.Module]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_TAKES = ("hidden", "causal_mask", "cos", "sin")
_PLAIN = Traced(Layer, _TAKES, ("hidden",))
_SELECTING = Traced(SelectingLayer, _TAKES, ("hidden", "selected"))
_REUSING = Traced(ReusingLayer, (*_TAKES, "selected"), ("hidden",))


@dataclass(frozen=True)
class TracedLayer:
    """A kind of decoder layer.

    Attributes:
        kind: its facts.
        config: the fields of the configuration that list something for every layer, with the entry
            that layers of this kind have there.
        traced: the region.
    """

    kind: LayerKind
    config: Mapping[str, str]
    traced: Traced = _PLAIN


_FOR_TRACING: dict[str, Any] = {
    "layer_types": None,
    "pad_token_id": None,  # matters to training alone, and may lie outside the vocabulary
}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers.

    Attributes:
        model_type: as ``config.json`` has it, exactly.
        config: class of the configuration.
        model: class of the reference model.
        rotary: class that makes RoPE's frequencies.
        layers: the kinds of decoder layer.
        index_rope_interleaved: see :class:`~dsa_compile.model_spec.ModelSpec`.
        overrides: fields of the configuration that tracing needs otherwise.
        when_null: what fields mean that the configuration may leave null.
        output_gate: see :class:`~dsa_compile.model_spec.ModelSpec`.
        extra_fields: fields that the class of the configuration reads but does not declare.
        prologue: what comes before the first layer.
        head: what makes logits of the last layer's result.
        draft: what comes before the layer of the multi-token-prediction module.
    """

    model_type: str
    config: type[PreTrainedConfig]
    model: Any
    rotary: Any
    layers: tuple[TracedLayer, ...]
    index_rope_interleaved: bool
    overrides: Mapping[str, Any] = field(default_factory=lambda: _FOR_TRACING)
    when_null: Mapping[str, Any] = field(default_factory=dict)
    output_gate: bool = False
    extra_fields: tuple[str, ...] = ("num_experts",)
    prologue: Traced = Traced(
        Embed, ("input_ids", "positions"), ("hidden", "causal_mask", "cos", "sin")
    )
    head: Traced = Traced(Head, ("hidden",), ("logits",))
    draft: Traced = Traced(
        Draft, ("input_ids", "positions", "hidden"), ("hidden", "causal_mask", "cos", "sin")
    )

    def layer(self, kind: str) -> TracedLayer:
        """The kind of layer of that name."""
        return next(layer for layer in self.layers if layer.kind.name == kind)

    def config_of(self, kinds: Sequence[str]) -> dict[str, Any]:
        """Fields of the configuration of a model with one layer of each kind."""
        layers = [self.layer(kind) for kind in kinds]
        lists = {name: [layer.config[name] for layer in layers] for name in self.layers[0].config}
        return {"num_hidden_layers": len(kinds), **lists, **self.overrides}

    def spec(self, config: Mapping[str, Any]) -> ModelSpec:
        """The geometry that a configuration describes.

        Args:
            config: the dict form of :attr:`config`, every field present.

        Raises:
            ConfigError: a field is missing or has an unsupported value.
        """
        check_rope(config)
        meant = {name: it for name, it in self.when_null.items() if config.get(name) is None}
        return ModelSpec.from_config(
            {**config, **meant},
            layer_kinds=self._layer_kinds(config),
            kinds=[layer.kind for layer in self.layers],
            index_rope_interleaved=self.index_rope_interleaved,
            output_gate=self.output_gate,
        )

    def _layer_kinds(self, config: Mapping[str, Any]) -> list[str]:
        count = config.get("num_hidden_layers")
        columns: dict[str, Sequence[str]] = {}
        for name in self.layers[0].config:
            known = {layer.config[name] for layer in self.layers}
            listed = config.get(name)
            if not isinstance(listed, list | tuple):
                raise ConfigError(f"config.json: {name}={shown(listed)} should be a list")
            if len(listed) != count or not known.issuperset(map(str, listed)):
                raise ConfigError(
                    f"config.json: {name} must list {' or '.join(map(repr, sorted(known)))} for "
                    f"each of the {count} layers, found {len(listed)} entries of "
                    f"{shown(sorted(set(map(str, listed))))}"
                )
            columns[name] = listed
        return [
            self._kind_of({name: listed[index] for name, listed in columns.items()}, index)
            for index in range(len(next(iter(columns.values()))))
        ]

    def _kind_of(self, entries: Mapping[str, str], index: int) -> str:
        for layer in self.layers:
            if layer.config == entries:
                return layer.kind.name
        told = ", ".join(f"{name}={entry!r}" for name, entry in entries.items())
        raise ConfigError(f"config.json: layer {index} with {told} is not supported")


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
        "index_share_for_mtp_iteration",  # about drafts
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
    output_gate=True,
    extra_fields=("first_k_dense_replace",),
)

ARCHITECTURES: dict[str, Architecture] = {
    entry.model_type: entry for entry in (DEEPSEEK_V32, GLM_MOE_DSA, AXK2)
}
"""By model type."""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The architecture of a configuration, by its model type.

    Raises:
        ConfigError: see :func:`~dsa_compile.frontend.model_checks.check_model_type`.
    """
    return ARCHITECTURES[check_model_type(config)]


def load_config(raw: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration as transformers understands it: defaults filled in, old names mapped.

    Args:
        raw: ``config.json``.

    Raises:
        ConfigError: another architecture, a field that transformers would ignore, or transformers
            refuses it.
    """
    architecture = architecture_of(raw)
    check_fields(raw, architecture.config, architecture.extra_fields)
    check_dtypes(raw)
    for name, largest in LARGEST.items():  # transformers makes a list of as many entries
        if isinstance(size := raw.get(name), int | float) and size > largest:
            raise ConfigError(f"config.json: {name}={shown(size)} must be from 1 to {largest}")
    try:
        return architecture.config(**copy.deepcopy(dict(raw)))  # it changes what it is given
    # the strict dataclass raises its own classes and, from rope validation, KeyError
    except Exception as error:
        raise refused(error) from None


def refused(error: Exception) -> ConfigError:
    """What to raise where classes of transformers raised an error over a configuration."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"config.json: transformers refuses it: {reason}")


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """The geometry of the dict form of a configuration as transformers understands it.

    Raises:
        ConfigError: another architecture, a missing field, or an unsupported value.
    """
    return architecture_of(config).spec(config)
