"""Drafts by plain calls of the reference ops over the checkpoint's weights: no graphs, no plans.

From the state at position i and token i + 1 the multi-token-prediction (MTP) module drafts token
i + 2; its own output and its draft take their places for the next depth, as in serving engines.
States are taken after the final norm on both sides, the module's own between depths too.

What an artifact's draft plans and an engine make is held to this; it knows neither.

Hub layout: layer ``num_hidden_layers`` holds a mixture-of-experts decoder layer under the usual
names, and ``enorm``, ``hnorm``, ``eh_proj``, ``embed_tokens``, ``shared_head.norm`` and
``shared_head.head``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ir.match import argument, calls
from dsa_compile.measure.eval.constants import Rope
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.probe import ProbeRunner
from dsa_compile.ops import Family, Form, ops_of
from dsa_compile.ops.attention import absorb_query, expand_output, paged_latent_attention
from dsa_compile.ops.cache import write_index_cache, write_latent_cache
from dsa_compile.ops.indexer import paged_index_topk
from dsa_compile.ops.mlp import embedding, linear, swiglu
from dsa_compile.ops.moe import experts, router
from dsa_compile.ops.norm import layer_norm, rms_norm
from dsa_compile.ops.rope import rope_half, rope_interleaved, rope_tables
from dsa_compile.weights.canonical import ParameterInfo, canonical_parameters, compute_dtype
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.layout import stored_parts
from dsa_compile.weights.shard_index import read_shard_index
from dsa_compile.weights.validation import check_part, open_homes, require_keys


def attention_scale(loaded: LoadedArtifact) -> float:
    """The factor on the dot products of attention, the same in all layers."""
    found = (
        argument(node, "scale")
        for region in loaded.regions.values()
        for node in calls(region.graph, *ops_of(Family.ATTENTION, Form.FLAT))
    )
    return next(found)


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


def load_mtp(model_dir: Path, spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """The module's weights by name without the layer's prefix, in ``dtype`` or fp32.

    The same parameters as in other layers stay fp32.

    Raises:
        CheckpointError: the model has no such module, or it is incomplete or misshapen.
    """
    if not spec.num_nextn_predict_layers:
        raise CheckpointError(
            f"{model_dir}: config.json has num_nextn_predict_layers 0: the model cannot draft"
        )
    prefix = f"model.layers.{spec.num_hidden_layers}."
    checkpoint = _open(model_dir, spec, _parameters(spec, prefix))
    weights = {}
    for name in _parameters(spec, prefix):
        out = torch.empty(checkpoint.shape(name), dtype=compute_dtype(name, dtype))
        checkpoint.read_into(name, out)
        weights[name.removeprefix(prefix)] = out
    return weights


def _parameters(spec: ModelSpec, prefix: str) -> dict[str, ParameterInfo]:
    layer = spec.num_hidden_layers
    kind = next(k.name for k in spec.kinds if k.mlp == "experts" and k.indexer)
    longer = replace(spec, num_hidden_layers=layer + 1, layer_kinds=(*spec.layer_kinds, kind))
    decoder = {
        name: info
        for name, info in canonical_parameters(longer, [layer]).items()
        if name.startswith(prefix)
    }
    hidden, vocab = spec.hidden_size, spec.vocab_size
    own = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (vocab, hidden),
        "shared_head.norm.weight": (hidden,),
        "shared_head.head.weight": (vocab, hidden),
    }
    return decoder | {prefix + name: ParameterInfo(shape, False) for name, shape in own.items()}


def _open(model_dir: Path, spec: ModelSpec, parameters: Mapping[str, ParameterInfo]) -> Checkpoint:
    """A checkpoint that gives these parameters and cares for no others."""
    index = read_shard_index(model_dir)
    parts = {name: stored_parts(name, info.shape, index) for name, info in parameters.items()}
    wanted = [part for group in parts.values() for part in group]
    require_keys(model_dir, [part.key for part in wanted], index)
    used = {part.key for part in wanted}
    used |= {part.scale_key for part in wanted if part.scale_key in index}
    homes = open_homes(model_dir, used, index)
    block = spec.quantization.block if spec.quantization else None
    for part in wanted:
        check_part(part, homes, spec.quantization)
    return Checkpoint(model_dir, parameters, parts, homes, block)


class Drafter:
    """The MTP module over one sequence.

    Args:
        loaded: the artifact, for geometry, frequencies and dtype.
        max_tokens: longest sequence.
        depth: drafts in a chain.
        shared_selection: whether deeper drafts attend to the keys that the first of their chain
            selected, which are none of the chain's own; None for what the model's configuration
            says.

    Raises:
        UserError: the model has no MTP module, or its weights cannot be had.
    """

    def __init__(
        self,
        loaded: LoadedArtifact,
        max_tokens: int,
        depth: int,
        shared_selection: bool | None = None,
    ) -> None:
        spec = loaded.spec
        dtype: torch.dtype = getattr(torch, loaded.manifest.dtype)
        self.depth = depth
        self._eps = spec.rms_norm_eps
        self._weights = load_mtp(loaded.model_dir, spec, dtype)
        self._shared = spec.shared_draft_selection if shared_selection is None else shared_selection
        self._selected: Tensor | None = None
        rows = max_tokens * depth
        self._layer = DecoderLayer(
            spec, self._weights, Rope.of(loaded), attention_scale(loaded), rows
        )

    def first(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts of depth 1 at all positions of a sequence.

        Args:
            states: [n, H], the model's at positions 0 to n - 1, after its final norm.
            tokens: int64 [n], those at positions 1 to n.

        Returns:
            Drafted tokens int64 [n], for positions 2 to n + 1, and the module's states [n, H].
        """
        drafts, after, selected = self._step(states, tokens, Rows.sequence(len(tokens)))
        self._selected = selected if self._shared else None
        return drafts, after

    def deeper(
        self, starts: Tensor, length: int, depth: int, states: Tensor, drafts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drafts of ``depth`` >= 2 of the chains that started at positions ``starts``.

        Call for depths in order, after :meth:`first` on a sequence of ``length``.

        Args:
            starts: int64 [C], positions of the states that the chains started from.
            length: n of :meth:`first`.
            depth: of the drafts to make.
            states: [C, H], the module's at the depth before.
            drafts: int64 [C], made at the depth before.

        Returns:
            As :meth:`first`, [C].
        """
        count = len(starts)
        chain = torch.arange(count)
        columns = torch.arange(int(starts.max()) + depth)
        # up to its start a chain sees the sequence's rows, then its own
        ahead = columns - starts.unsqueeze(1) - 1
        own = length + ahead * count + chain.unsqueeze(1)
        tables = torch.where(ahead < 0, columns, torch.where(ahead < depth - 1, own, -1))
        rows = Rows(
            positions=starts + depth - 1,
            slots=length + (depth - 2) * count + chain,
            tables=tables.int(),
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
            context_lens=(starts + depth).int(),
        )
        selected = None if self._selected is None else self._selected[starts]
        return self._step(states, drafts, rows, selected)[:2]

    def _step(
        self, states: Tensor, tokens: Tensor, rows: Rows, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        w, eps = self._weights, self._eps
        embedded = rms_norm(embedding(tokens, w["embed_tokens.weight"]), w["enorm.weight"], eps)
        joined = torch.cat((embedded, rms_norm(states, w["hnorm.weight"], eps)), -1)
        hidden, chosen = self._layer(linear(joined, w["eh_proj.weight"]), rows, selected)
        after = rms_norm(hidden, w["shared_head.norm.weight"], eps)
        drafts = linear(after, w["shared_head.head.weight"]).float().argmax(-1)
        return drafts, self._carried(hidden, after), chosen

    def _carried(self, hidden: Tensor, after: Tensor) -> Tensor:
        """States that the next depth takes: those after the norm of the module's head."""
        return after


class FinalNorm:
    """Gives the states that head and MTP module take: the residual stream after the final norm."""

    def __init__(self, loaded: LoadedArtifact) -> None:
        checkpoint = Checkpoint.open(
            loaded.model_dir, loaded.spec, range(loaded.spec.num_hidden_layers)
        )
        self._eps = loaded.spec.rms_norm_eps
        self._weight = torch.empty(
            loaded.spec.hidden_size, dtype=getattr(torch, loaded.manifest.dtype)
        )
        checkpoint.read_into("model.norm.weight", self._weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return rms_norm(hidden, self._weight, self._eps)


def chain_matches(
    runner: ProbeRunner,
    drafter: Drafter,
    norm: FinalNorm,
    prompt: Sequence[int],
    continuation: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Chains of drafts, one from each token of a continuation.

    Returns:
        Which drafts equal the continuation, int64 [depth, C], and the module's states behind them,
        [depth, C, H].
    """
    tokens = torch.tensor([*prompt, *continuation])
    # the last chain's last draft is for the last token
    starts = torch.arange(len(prompt) - 1, len(tokens) - 1 - drafter.depth)
    states = norm(runner.trace(tokens.tolist()).hidden[-1])[:-1]
    drafts, after = drafter.first(states, tokens[1:])
    drafts, after = drafts[starts], after[starts]
    right, by_depth = [drafts == tokens[starts + 2]], [after]
    for depth in range(2, drafter.depth + 1):
        drafts, after = drafter.deeper(starts, len(states), depth, after, drafts)
        right.append(drafts == tokens[starts + 1 + depth])
        by_depth.append(after)
    return torch.stack(right).long(), torch.stack(by_depth)
