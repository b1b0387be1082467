"""The parameters of a model: names, shapes, and which of them never leave fp32.

Names are those of ``state_dict()`` of its class in transformers. Routed experts are
fused: ``gate_up_proj`` [experts, 2 * intermediate, hidden] (gate rows first) and ``down_proj``
[experts, hidden, intermediate].
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dsa_compile.facts.model_spec import LayerKind, ModelSpec

# The reference computes the index head weights and the router's choice in fp32; rounding either
# changes which tokens or experts are chosen.
_FP32_SUFFIXES = (
    *(".indexer.weights_proj.weight", ".mlp.gate.e_score_correction_bias"),
    "rotary_emb.alpha",
)

# Templates of the parameters outside decoder layers, by their names in the modules that are traced.
_OUTSIDE_LAYERS = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "{norm}.weight",
    "lm_head.weight": "lm_head.weight",
    "rotary_emb.alpha": "model.rotary_emb.alpha",
}


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter: its shape, and whether it stays fp32 under every recipe."""

    shape: tuple[int, ...]
    keep_fp32: bool


def canonical_parameters(spec: ModelSpec, layers: Sequence[int]) -> dict[str, ParameterInfo]:
    """Parameters of the embedding, the given ``layers``, the final norm and the head, in order.

    ``layers`` may include the MTP layer; the copies of embedding and head that checkpoints store
    with it are not listed.
    """
    return {
        name: ParameterInfo(shape, keep_fp32(name, not spec.router_bias))
        for name, shape in _parameters(spec, layers)
    }


def replaced_by_sharing(spec: ModelSpec, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters that a layer would have if it did not use an earlier layer's result instead."""
    kind = spec.kind_of(layer)
    alone = dict(_attention(spec, replace(kind, latents="own")))
    alone |= {} if kind.indexer else {f"indexer.{name}": it for name, it in _indexer(spec)}
    has = dict(_attention(spec, kind))
    yield from ((f"model.layers.{layer}.self_attn.{n}", alone[n]) for n in alone if n not in has)


def template_of(key: str) -> str:
    """The template of a parameter that the traced module of a region calls ``key``.

    Such as ``{layer}.mlp.gate.weight``; the call of the region has the variables.
    """
    return _OUTSIDE_LAYERS.get(key, "{layer}." + key)


def keep_fp32(name: str, softmax_router: bool = False) -> bool:
    """Whether the parameter called ``name`` stays fp32 under every recipe.

    With a softmax over its scores (``softmax_router``) the router has no bias to keep in fp32, and
    its matrix is kept instead.
    """
    return name.endswith(_FP32_SUFFIXES) or (softmax_router and is_router(name))


def is_router(name: str) -> bool:
    """Whether a parameter is the matrix by which experts are chosen."""
    return name.endswith(".mlp.gate.weight")


def compute_dtype(
    name: str, recipe_dtype: torch.dtype, softmax_router: bool = False
) -> torch.dtype:
    """The dtype a parameter has at run time under a recipe; see :func:`keep_fp32`."""
    return torch.float32 if keep_fp32(name, softmax_router) else recipe_dtype


def _parameters(spec: ModelSpec, layers: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = spec.hidden_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    if spec.learned_frequencies:
        yield "model.rotary_emb.alpha", (spec.qk_rope_head_dim // 2,)
    for layer in layers:
        prefix = f"model.layers.{layer}."
        kind = spec.kind_of(layer)
        for name, shape in _attention(spec, kind):
            yield f"{prefix}self_attn.{name}", shape
        for name, shape in _indexer(spec) if kind.indexer else ():
            yield f"{prefix}self_attn.indexer.{name}", shape
        for name, shape in _MLPS[kind.mlp](spec):
            yield f"{prefix}mlp.{name}", shape
        yield from _norm(spec, f"{prefix}input_layernorm", spec.gated_norm_rank)
        gated = spec.gated_norm_rank if kind.mlp == "experts" else 0
        yield from _norm(spec, f"{prefix}post_attention_layernorm", gated)
        if layer == spec.mtp_layer:
            yield f"{prefix}enorm.weight", (hidden,)
            yield f"{prefix}hnorm.weight", (hidden,)
            yield f"{prefix}eh_proj.weight", (hidden, 2 * hidden)
            yield f"{prefix}shared_head.norm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (spec.vocab_size, hidden)


def _norm(spec: ModelSpec, name: str, gated: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A norm, with the projections of its gate where that has a rank."""
    hidden = spec.hidden_size
    if not gated:
        yield f"{name}.weight", (hidden,)
        return
    yield f"{name}.norm.weight", (hidden,)
    yield f"{name}.mlp.fc1.weight", (gated, hidden)
    yield f"{name}.mlp.fc2.weight", (hidden, gated)


def _attention(spec: ModelSpec, kind: LayerKind) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    if spec.q_lora_rank:
        yield "q_a_proj.weight", (spec.q_lora_rank, hidden)
        yield "q_a_layernorm.weight", (spec.q_lora_rank,)
    if spec.output_gate:  # of what comes before and after the norm: queries, and a gate of values
        both = spec.qk_head_dim + spec.v_head_dim
        yield "q_gate_proj.weight", (heads * both, 2 * spec.q_lora_rank)
    elif spec.q_lora_rank:
        yield "q_b_proj.weight", (heads * spec.qk_head_dim, spec.q_lora_rank)
    else:
        yield "q_proj.weight", (heads * spec.qk_head_dim, hidden)
    if kind.latents != "borrowed":
        yield "kv_a_proj_with_mqa.weight", (spec.latent_width(kind), hidden)
        yield "kv_a_layernorm.weight", (spec.kv_lora_rank,)
    nope = spec.qk_head_dim - spec.rope_dim(kind)
    yield "kv_b_proj.weight", (heads * (nope + spec.v_head_dim), spec.kv_lora_rank)
    yield "o_proj.weight", (hidden, heads * spec.v_head_dim)
    if spec.scaled_queries:
        yield from _scaling(heads)


def _indexer(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries = spec.index_n_heads * spec.index_head_dim
    yield "wq_b.weight", (queries, spec.q_lora_rank or spec.hidden_size)
    yield "wk.weight", (spec.index_head_dim, spec.hidden_size)
    yield "k_norm.weight", (spec.index_head_dim,)
    yield "k_norm.bias", (spec.index_head_dim,)
    yield "weights_proj.weight", (spec.index_n_heads, spec.hidden_size)
    if not spec.q_lora_rank:
        yield "q_input_norm.weight", (spec.hidden_size,)
        yield "q_input_norm.bias", (spec.hidden_size,)
    if spec.scaled_queries:
        yield from _scaling(spec.index_n_heads)


def _scaling(heads: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "softmax_scaling.scale", (heads,)
    yield "softmax_scaling.bias", (heads,)


def _gated_mlp(hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gate_proj.weight", (intermediate, hidden)
    yield "up_proj.weight", (intermediate, hidden)
    yield "down_proj.weight", (hidden, intermediate)


def _dense_mlp(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _gated_mlp(spec.hidden_size, spec.intermediate_size)


def _moe(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, experts = spec.hidden_size, spec.moe_intermediate_size, spec.n_routed_experts
    yield "experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield "experts.down_proj", (experts, hidden, inner)
    yield "gate.weight", (experts, hidden)
    if spec.router_bias:
        yield "gate.e_score_correction_bias", (experts,)
    for name, shape in _gated_mlp(hidden, inner * spec.n_shared_experts):
        yield f"shared_experts.{name}", shape


_MLPS = {"dense": _dense_mlp, "experts": _moe}
