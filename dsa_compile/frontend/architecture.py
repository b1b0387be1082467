"""Architecture of a model, as the table of models has it: :class:`Architecture`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from dsa_compile.errors import ConfigError, shown
from dsa_compile.facts.model_spec import LayerKind, ModelSpec
from dsa_compile.frontend.config_fields import check_rope
from dsa_compile.frontend.modules import Draft, Embed, Head, Layer


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


TAKES = ("hidden", "causal_mask", "cos", "sin")
"""Inputs of every decoder layer."""


@dataclass(frozen=True)
class TracedLayer:
    """A kind of decoder layer.

    Attributes:
        kind: its facts.
        config: the lists of something for every layer, in the configuration or derived from it,
            with the entry that layers of this kind have there.
        traced: the region.
    """

    kind: LayerKind
    config: Mapping[str, str | int]
    traced: Traced = Traced(Layer, TAKES, ("hidden",))


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
        index_rope_interleaved: see :class:`~dsa_compile.facts.model_spec.ModelSpec`.
        overrides: fields of the configuration that tracing needs changed.
        when_null: what fields mean that the configuration may leave null.
        facts: attributes of :class:`~dsa_compile.facts.model_spec.ModelSpec` that no field says.
        derived: makes further lists of something for every layer from the configuration.
        small: makes further fields of a configuration of one layer of each kind.
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
    facts: Mapping[str, Any] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], Mapping[str, Sequence[Any]]] = lambda config: {}
    small: Callable[[Sequence[LayerKind]], Mapping[str, Any]] = lambda kinds: {}
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
        small = self.small([layer.kind for layer in layers])
        return {"num_hidden_layers": len(kinds), **lists, **small, **self.overrides}

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
            **self.facts,
        )

    def _layer_kinds(self, config: Mapping[str, Any]) -> list[str]:
        count = config.get("num_hidden_layers")
        columns: dict[str, Sequence[Any]] = {}
        config = {**config, **self.derived(config)}
        for name in self.layers[0].config:
            known = {layer.config[name] for layer in self.layers}
            listed = config.get(name)
            if not isinstance(listed, list | tuple):
                raise ConfigError(f"config.json: {name}={shown(listed)} should be a list")
            if len(listed) != count or not all(any(e == k for k in known) for e in listed):
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

    def _kind_of(self, entries: Mapping[str, Any], index: int) -> str:
        for layer in self.layers:
            if layer.config == entries:
                return layer.kind.name
        told = ", ".join(f"{name}={entry!r}" for name, entry in entries.items())
        raise ConfigError(f"config.json: layer {index} with {told} is not supported")
