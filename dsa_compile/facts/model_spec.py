"""Specification of a model for the compiler and the runtime: its configuration, parsed once.

Source of the fields: ``DeepseekV32Config`` in transformers and the ``config.json`` published with
DeepSeek-V3.2; names are kept as they are there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dsa_compile.errors import ConfigError, shown
from dsa_compile.facts.block_quantization import BlockQuantization, quantization_of
from dsa_compile.facts.config_values import LARGEST_SIZE, field_of, number_of

LARGEST = {
    "n_routed_experts": 2**16,
    "num_hidden_layers": 2**16,
    "vocab_size": 2**24,  # masks hold a row of it for each request
}
"""Limits of sizes that are counted one by one before a weight is read."""

# Fields that must hold one value: the reference model has other code paths, the released models
# never take them, and a silent difference would be worse than a refusal.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# Fields of the published config.json that transformers does not know and would pass over.
_FIXED_IF_PRESENT: dict[str, Any] = {
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "moe_router_dtype": "float32",
    "rope_interleave": True,
}
# The same, by whether the router chooses by a bias beside its scores.
_FIXED_BY_ROUTER: dict[bool, dict[str, Any]] = {
    True: {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    False: {"scoring_func": "softmax", "topk_method": "group_limited_greedy"},
}
CHECKED_FIELDS = frozenset({*_FIXED_IF_PRESENT, *_FIXED_BY_ROUTER[True]}) | {
    *("indexer_rope_interleave", "num_nextn_predict_layers", "qk_head_dim", "quantization_config")
}
"""Fields that some releases have and transformers does not know, whose values are checked."""


Latents = Literal["own", "shared", "borrowed"]


@dataclass(frozen=True)
class LayerKind:
    """Properties that all decoder layers of a kind share; passes count promised sites by them.

    Attributes:
        name: of the kind, and of the region that computes it.
        mlp: ``"dense"`` for a gated MLP, ``"experts"`` for routed experts and a shared one.
        indexer: whether it has an indexer of its own, with its weights and its cache. A layer
            without one attends to what the last layer before it that has one selected.
        rope: whether attention and indexer rotate a part of queries and keys.
        latents: whose latents attention reads: its own, which ``"shared"`` layers hand on to
            others, or those that the last ``"shared"`` layer before a ``"borrowed"`` one handed on,
            of those that rotate as it does.
    """

    name: str
    mlp: Literal["dense", "experts"]
    indexer: bool = True
    rope: bool = True
    latents: Latents = "own"


@dataclass(frozen=True)
class ModelSpec:
    """One geometry of latent attention with an indexer; sizes count elements.

    Attributes:
        model_type: of ``config.json``; which chat format a model without a template has.
        layer_kinds: for each layer the name of its kind.
        kinds: the kinds of layer that the architecture has.
        index_rope_interleaved: whether the indexer rotates neighbours, as attention does, or the
            two halves of what it rotates.
        gated_norm_rank: of the gate after the norm before attention and the one before experts; 0
            where there is none.
        output_gate: whether the queries' projection also makes a gate of attention's result.
        q_lora_rank: 0 where queries are projected from what attention is given.
        router_bias: whether experts are chosen by a bias beside their scores, which are sigmoids;
            a softmax without it.
        scaled_queries: whether queries are scaled by position, with learned factors for each head.
        learned_frequencies: whether RoPE's frequencies have learned factors.
        shared_draft_selection: whether deeper drafts attend to what the first of a step selected.
        other_parts: prefixes of what checkpoints have beside the text model.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_kinds: tuple[str, ...]
    kinds: tuple[LayerKind, ...]
    index_rope_interleaved: bool
    num_nextn_predict_layers: int
    quantization: BlockQuantization | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    gated_norm_rank: int = 0
    output_gate: bool = False
    router_bias: bool = True
    scaled_queries: bool = False
    learned_frequencies: bool = False
    shared_draft_selection: bool = False
    other_parts: tuple[str, ...] = ()

    @property
    def input_norm(self) -> str:
        """Name of the norm that a layer begins with, within the layer."""
        return "input_layernorm.norm" if self.gated_norm_rank else "input_layernorm"

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def rope_dim(self, kind: LayerKind) -> int:
        """Width of the part of a query that layers of a kind rotate."""
        return self.qk_rope_head_dim if kind.rope else 0

    def latent_width(self, kind: LayerKind) -> int:
        """Width of one latent-cache row: the compressed KV and the rotated shared key."""
        return self.kv_lora_rank + self.rope_dim(kind)

    def kind(self, name: str) -> LayerKind:
        """The kind of layer of that name."""
        return next(kind for kind in self.kinds if kind.name == name)

    @property
    def mtp_layer(self) -> int | None:
        """Number of the multi-token-prediction (MTP) layer, the one after the last; None without.

        The first, where there are several.
        """
        return self.num_hidden_layers if self.num_nextn_predict_layers else None

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, the MTP layer among them: that has experts and an indexer."""
        if layer == self.mtp_layer:
            return self.draft_kind()
        return self.kind(self.layer_kinds[layer])

    def draft_kind(self, *, deeper: bool = False) -> LayerKind:
        """The kind as which the MTP layer runs for the first draft of a step, or a deeper one."""
        own = not (deeper and self.shared_draft_selection)
        return next(kind for kind in self.kinds if kind.mlp == "experts" and kind.indexer is own)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        layer_kinds: Sequence[str],
        kinds: Sequence[LayerKind],
        index_rope_interleaved: bool,
        **facts: Any,
    ) -> "ModelSpec":
        """Parse the dict form of a configuration of transformers; every field must be present.

        Args:
            config: names as in ``DeepseekV32Config``.
            layer_kinds: see the attributes, as are the others.
            kinds: all that ``layer_kinds`` may name.
            index_rope_interleaved: what the reference model computes.
            facts: attributes that no field says.

        Raises:
            ConfigError: a missing field, or an unsupported value.
        """
        fixed = _FIXED_IF_PRESENT | _FIXED_BY_ROUTER[facts.get("router_bias", True)]
        present = {n: wanted for n, wanted in fixed.items() if n in config}
        for name, wanted in (_FIXED | present).items():
            got = field_of(config, name, type(wanted))
            if got != wanted:
                raise ConfigError(
                    f"config.json: {name}={shown(got)} is not supported, only {wanted!r} "
                    f"(no released DeepSeek-V3.2 uses it)"
                )
        # transformers passes over this field and computes what its classes say
        interleaved = config.get("indexer_rope_interleave", index_rope_interleaved)
        if interleaved is not index_rope_interleaved:
            raise ConfigError(
                f"config.json: indexer_rope_interleave={shown(interleaved)} is not supported for "
                f"model_type={shown(config.get('model_type'))}: its reference model in "
                f"transformers computes {index_rope_interleaved!r}"
            )
        eos = config.get("eos_token_id")
        eos_ids = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
        bos_id = config.get("bos_token_id")
        for name, ids in (("eos_token_id", eos_ids), ("bos_token_id", (bos_id or 0,))):
            if not all(type(token) is int for token in ids):
                raise ConfigError(f"config.json: {name}={shown(config[name])} must name token ids")
        given = {k: v for k, v in config.items() if v is not None or k not in _NULL}
        filled = {**_ABSENT, **_NULL, **given}
        spec = cls(
            model_type=field_of(config, "model_type", str),
            **{name: field_of(filled, name, int) for name in _INT_FIELDS},
            norm_topk_prob=field_of(config, "norm_topk_prob", bool),
            routed_scaling_factor=number_of(config, "routed_scaling_factor"),
            rms_norm_eps=number_of(config, "rms_norm_eps"),
            layer_kinds=tuple(layer_kinds),
            kinds=tuple(kinds),
            index_rope_interleaved=index_rope_interleaved,
            num_nextn_predict_layers=field_of(filled, "num_nextn_predict_layers", int),
            quantization=quantization_of(config),
            bos_token_id=bos_id,
            eos_token_ids=eos_ids,
            shared_draft_selection=field_of(filled, "index_share_for_mtp_iteration", bool),
            **facts,
        )
        if config.get("q_lora_rank") == 0:
            raise ConfigError("config.json: q_lora_rank=0 must be at least 1")
        if config.get("qk_head_dim") not in (None, spec.qk_head_dim):
            must = f"must be qk_nope_head_dim + qk_rope_head_dim = {spec.qk_head_dim}"
            raise ConfigError(f"config.json: qk_head_dim={shown(config['qk_head_dim'])} {must}")
        if config.get("num_key_value_heads") not in (None, spec.num_attention_heads):
            must = "must equal num_attention_heads (MLA has one latent for all)"
            raise ConfigError(f"config.json: num_key_value_heads {must}")
        for problem in spec.problems():
            raise ConfigError(f"config.json: {problem}")
        return spec

    def problems(self) -> Iterator[str]:
        """Problems, a sentence each, lazily: values out of range or in conflict."""
        for name in _INT_FIELDS:
            least, largest = int(name not in _ABSENT), LARGEST.get(name, LARGEST_SIZE)
            if not least <= getattr(self, name) <= largest:
                yield f"{name}={getattr(self, name)} must be from {least} to {largest}"
        for name in _NUMBER_FIELDS:
            if not 0 < getattr(self, name) < math.inf:
                yield f"{name}={getattr(self, name)} must be a positive number"
        if self.n_group < 1:
            return  # the rules below divide by it
        rules = (
            (
                self.n_routed_experts % self.n_group == 0,
                f"n_routed_experts={self.n_routed_experts} must divide into "
                f"n_group={self.n_group} groups",
            ),
            (
                self.n_routed_experts // self.n_group >= 2,
                "each routing group needs at least 2 experts (a group's score is its top two)",
            ),
            (
                self.topk_group <= self.n_group,
                f"topk_group={self.topk_group} exceeds n_group={self.n_group}",
            ),
            (
                self.num_experts_per_tok
                <= self.topk_group * (self.n_routed_experts // self.n_group),
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds the experts in "
                f"topk_group={self.topk_group} groups",
            ),
            (
                self.index_head_dim > self.qk_rope_head_dim,
                "index_head_dim must exceed qk_rope_head_dim (the indexer rotates a part of it)",
            ),
            (self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even"),
            (
                0 <= self.num_nextn_predict_layers <= LARGEST_SIZE,
                f"num_nextn_predict_layers={self.num_nextn_predict_layers} must be at least 0",
            ),
            (
                all(0 <= token <= LARGEST_SIZE for token in self.eos_token_ids),
                f"eos_token_id={shown(list(self.eos_token_ids))} must name token ids",
            ),
            (
                self.bos_token_id is None or 0 <= self.bos_token_id <= LARGEST_SIZE,
                f"bos_token_id={self.bos_token_id} must name a token id",
            ),
            (
                len(self.layer_kinds) == self.num_hidden_layers,
                f"{len(self.layer_kinds)} layer_kinds for num_hidden_layers="
                f"{self.num_hidden_layers}",
            ),
            (
                {kind.name for kind in self.kinds}.issuperset(self.layer_kinds),
                "layer_kinds names a kind that kinds lacks",
            ),
        )
        broken = [message for holds, message in rules if not holds]
        yield from broken
        if not broken and not self.kind(self.layer_kinds[0]).indexer:
            yield "the first layer must have an indexer (indexer_types), not reuse a selection"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict; :meth:`from_json` takes it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ModelSpec":
        """Rebuild from :meth:`to_json`; raises TypeError or KeyError on a foreign dict."""
        quantization = data["quantization"]
        return cls(
            **{
                **data,
                "layer_kinds": tuple(data["layer_kinds"]),
                "kinds": tuple(LayerKind(**kind) for kind in data["kinds"]),
                "eos_token_ids": tuple(data["eos_token_ids"]),
                "other_parts": tuple(data["other_parts"]),
                "quantization": None
                if quantization is None
                else BlockQuantization(tuple(quantization["block"]), quantization["scale_fmt"]),
            }
        )


# What fields mean that some model types do not have.
_ABSENT = {"q_lora_rank": 0, "gated_norm_rank": 0}
# Likewise, and null means the same.
_NULL = {"num_nextn_predict_layers": 0, "index_share_for_mtp_iteration": False}
_INT_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"),
    *("num_hidden_layers", "num_attention_heads"),
    *("n_shared_experts", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("index_topk", "index_n_heads", "index_head_dim", "max_position_embeddings"),
    "gated_norm_rank",
)
_NUMBER_FIELDS = ("routed_scaling_factor", "rms_norm_eps")
READ_FIELDS = (*_INT_FIELDS, *_NUMBER_FIELDS, "norm_topk_prob")
"""Fields of a configuration on which results depend, but those of which one value is taken."""
