"""A decoder layer in plain calls of the reference ops, in the form before any optimisation.

It runs layers that no graph was compiled for, such as the one of the multi-token-prediction module.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.constants import Rope
from dsa_compile.ops.attention import absorb_query, expand_output, paged_latent_attention
from dsa_compile.ops.cache import write_index_cache, write_latent_cache
from dsa_compile.ops.indexer import paged_index_topk
from dsa_compile.ops.mlp import linear, swiglu
from dsa_compile.ops.moe import experts, router
from dsa_compile.ops.norm import layer_norm, rms_norm
from dsa_compile.ops.rope import rope_half, rope_interleaved, rope_tables

_EPS = 1e-6  # of the norms inside attention, whatever the configuration says


@dataclass(frozen=True)
class Rows:
    """The tokens of one call and the cache rows they see, one row a block.

    Attributes:
        positions: int64 [T].
        slots: int64 [T], the cache rows the tokens write.
        tables: int32 [R, M], the cache rows of each request by position, padded with -1.
        cu_seqlens: int32 [R + 1].
        context_lens: int32 [R], this call's tokens included.
    """

    positions: Tensor
    slots: Tensor
    tables: Tensor
    cu_seqlens: Tensor
    context_lens: Tensor

    @classmethod
    def sequence(cls, length: int) -> "Rows":
        """One request of ``length`` tokens in the first cache rows."""
        rows = torch.arange(length)
        return cls(
            positions=rows,
            slots=rows,
            tables=rows.int()[None],
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
            context_lens=torch.tensor([length], dtype=torch.int32),
        )


class DecoderLayer:
    """A mixture-of-experts layer and its two caches.

    Args:
        spec: the model's geometry.
        weights: by canonical name without the layer's prefix.
        rope: rotary frequencies.
        scale: of the attention's dot products.
        rows: cache rows.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Tensor], rope: Rope, scale: float, rows: int
    ) -> None:
        self._spec, self._weights, self._rope, self._scale = spec, weights, rope, scale
        dtype = weights["input_layernorm.weight"].dtype
        self._latent = torch.zeros(rows, 1, spec.kv_lora_rank + spec.qk_rope_head_dim, dtype=dtype)
        self._index = torch.zeros(rows, 1, spec.index_head_dim, dtype=dtype)

    def __call__(
        self, x: Tensor, rows: Rows, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [T, H] after the layer; the cache rows it attends to, int32 [T, K].

        Args:
            x: [T, H], the residual stream before it.
            rows: of its tokens.
            selected: int32 [T, K], cache rows to attend to, and no others; the indexer is not run
                then and writes nothing. None for those that it selects.
        """
        eps, w = self._spec.rms_norm_eps, self._weights
        normed = rms_norm(x, w["input_layernorm.weight"], eps)
        attended, chosen = self._attend(normed, rows, selected)
        x = x + attended
        return x + self._mix(rms_norm(x, w["post_attention_layernorm.weight"], eps)), chosen

    def _attend(self, x: Tensor, rows: Rows, selected: Tensor | None) -> tuple[Tensor, Tensor]:
        spec = self._spec
        w = {
            name.removeprefix("self_attn.").removesuffix(".weight"): tensor
            for name, tensor in self._weights.items()
        }
        tables = rope_tables(rows.positions, self._rope.inv_freq, self._rope.scaling, x.dtype)
        q_low = rms_norm(linear(x, w["q_a_proj"]), w["q_a_layernorm"], _EPS)
        q = linear(q_low, w["q_b_proj"]).unflatten(-1, (spec.num_attention_heads, -1))
        q_nope, q_pe = q.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], -1)
        kv = linear(x, w["kv_a_proj_with_mqa"])
        ckv, k_pe = kv.split([spec.kv_lora_rank, spec.qk_rope_head_dim], -1)
        ckv = rms_norm(ckv, w["kv_a_layernorm"], _EPS)
        k_pe = rope_interleaved(k_pe.unsqueeze(1), *tables).squeeze(1)
        write_latent_cache(ckv, k_pe, self._latent, rows.slots)

        chosen = self._choose(x, q_low, w, tables, rows) if selected is None else selected
        up = w["kv_b_proj"].unflatten(0, (spec.num_attention_heads, -1))
        w_uk, w_uv = up.split([spec.qk_nope_head_dim, spec.v_head_dim], 1)
        latent = paged_latent_attention(
            absorb_query(q_nope, w_uk),
            rope_interleaved(q_pe, *tables),
            self._latent,
            chosen,
            self._scale,
        )
        return linear(expand_output(latent, w_uv).flatten(1), w["o_proj"]), chosen

    def _choose(
        self,
        x: Tensor,
        q_low: Tensor,
        w: Mapping[str, Tensor],
        tables: tuple[Tensor, Tensor],
        rows: Rows,
    ) -> Tensor:
        spec = self._spec
        q = linear(q_low, w["indexer.wq_b"]).unflatten(-1, (spec.index_n_heads, -1))
        norm = w["indexer.k_norm"], w["indexer.k_norm.bias"]
        k = layer_norm(linear(x, w["indexer.wk"]), *norm, _EPS)
        write_index_cache(self._rotate(k.unsqueeze(1), tables).squeeze(1), self._index, rows.slots)
        heads = linear(x.float(), w["indexer.weights_proj"]) * spec.index_n_heads**-0.5
        return paged_index_topk(
            self._rotate(q, tables),
            heads,
            self._index,
            rows.tables,
            rows.cu_seqlens,
            rows.context_lens,
            spec.index_topk,
            spec.index_head_dim**-0.5,
        )

    def _rotate(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        width = self._spec.qk_rope_head_dim
        rotate = rope_interleaved if self._spec.index_rope_interleaved else rope_half
        return torch.cat((rotate(x[..., :width], *tables), x[..., width:]), -1)

    def _mix(self, x: Tensor) -> Tensor:
        spec, w = self._spec, self._weights
        share, choice = router(
            x,
            w["mlp.gate.weight"],
            w["mlp.gate.e_score_correction_bias"],
            spec.n_group,
            spec.topk_group,
            spec.num_experts_per_tok,
            spec.norm_topk_prob,
            spec.routed_scaling_factor,
        )
        routed = experts(
            x, share, choice, w["mlp.experts.gate_up_proj"], w["mlp.experts.down_proj"]
        )
        gate = linear(x, w["mlp.shared_experts.gate_proj.weight"])
        up = linear(x, w["mlp.shared_experts.up_proj.weight"])
        return routed + linear(swiglu(gate, up), w["mlp.shared_experts.down_proj.weight"])
