"""Faults of the ops' implementations, and of what binds them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.planted_bugs.changes import operator_named
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import (
    Plant,
    Planting,
    given_to,
    here,
    is_call,
    replaced,
    result,
    within,
    wrap,
)

TENSOR = "fp8-kv-tensor"
FP8, TRAINED_FP8 = {"recipe": "fp8"}, {"recipe": "fp8", "model": "trained-fp8"}
WIDE_FP8 = {"recipe": "fp8", "model": "wide-fp8"}
BF16, TRAINED = {"recipe": "bf16"}, {"recipe": "bf16", "model": "trained"}
ROUTER, SWIGLU = "ops.moe.router", "ops.quantize.swiglu_packed_quantize"
SINGLES, SEQUENCE = "ops.indexer._select_batch", "ops.indexer._select_sequence"
CHUNK, PAGED_FP8 = "ops.attention._attend_chunk", "ops.index_fp8.paged_index_topk_fp8"


def fault(id: str, about: str, plant: Plant, culprit: str = "", **given: Any) -> Fault:
    return Fault(id, about, plant, culprit, "kernel", **given)


# The router.
def group_scores(whole: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """Groups are chosen by scores without their bias."""

    def topk(right: Any, scores: Any, k: int, **kw: Any) -> Any:
        if scores.dim() == 3:
            scores = (scores.flatten(1) - bias).view_as(scores)
        return right(scores, k, **kw)

    with replaced("torch.Tensor.topk", topk):
        return whole(x, weight, bias, *rest)


def best_alone(whole: Any, scores: Any, k: int, **kw: Any) -> Any:
    if scores.dim() == 3:
        return SimpleNamespace(values=scores.amax(-1, keepdim=True))
    return whole(scores, k, **kw)


def biased(whole: Any, x: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    with replaced("torch.Tensor.gather", lambda right, scores, dim, indices: (
            right(scores, dim, indices) + bias[indices])):  # fmt: skip
        return whole(x, weight, bias, *rest)


def shared_over_scale(found: Any, x: Any, weight: Any, *rest: Any) -> Any:
    weights, indices = found
    return weights.masked_fill(indices >= weight.shape[0], 1.0 / rest[5]), indices


# The indexer.
def of_the_first_request(whole: Any, *given: Any) -> Any:
    tables = given[3]

    def rows(right: Any, some: Any, block_size: int, blocks: int) -> Any:
        mine = some.untyped_storage().data_ptr() == tables.untyped_storage().data_ptr()
        return right(tables[:1] if mine else some, block_size, blocks)

    with replaced("ops.indexer.block_rows", rows):
        return whole(*given)


def from_the_first_key(whole: Any, q: Any, weights: Any, keys: Any, slots: Any, *rest: Any) -> None:
    seen = max(len(q), len(keys) - len(q))
    whole(q, weights, keys[:seen], slots[:seen], *rest)


def two_selections(whole: Any, *given: Any) -> Any:
    *before, lengths, topk, scale = given
    return whole(*before, np.minimum(lengths, 2 * topk), topk, scale)


def row_by_row(whole: Any, pages: Any) -> Any:
    dim = pages.shape[-1] - 4
    keys = pages[..., :dim].contiguous().view(torch.float8_e4m3fn)
    return keys.float() * pages[..., dim:].contiguous().view(torch.float32)


def in_compacted_pages(found: Any, q: Any, weights: Any, cache: Any, tables: Any, *_: Any) -> Any:
    used, size = tables.clamp(min=0).unique(), cache.shape[1]
    block = torch.searchsorted(used, (found.clamp(min=0) // size).to(used.dtype)).int()
    return torch.where(found < 0, found, block * size + found % size)


# Attention.
def from_the_rows_end(found: Any, query: Any, *given: Any) -> Any:
    from dsa_compile.ops.attention import _gather

    rows, slots, scale, latent = given
    if not slots.numel() or not (slots >= 0).all():
        return found
    gathered = _gather(rows, slots)
    logits = torch.matmul(query.float(), gathered.transpose(1, 2)) * scale
    return torch.bmm(logits.softmax(-1), gathered[..., -latent:]).to(query.dtype)


# Experts, norms, products, RoPE.
def by_choice(whole: Any, x: Any, weights: Any, indices: Any, *rest: Any) -> Any:
    tokens = indices.shape[0]
    with replaced("torch.Tensor.__floordiv__", lambda right, order, top_k: order % tokens):
        return whole(x, weights, indices, *rest)


def reassociated(whole: Any, x: Any, weight: Any, eps: float) -> Any:
    if not x.dtype == weight.dtype == torch.float32:
        return whole(x, weight, eps)
    return (x * (x.square().mean(-1, keepdim=True).add(eps).rsqrt() * weight)).contiguous()


def rounded_sum(whole: Any, x: Any, residual: Any, weight: Any, *rest: Any) -> Any:
    with replaced("ops.quantize._norm", lambda right, total, *given: right(
            total.to(x.dtype).float(), *given)):  # fmt: skip
        return whole(x, residual, weight, *rest)


def mixed_halves(found: Any, *_: Any) -> Any:
    half = found[0].shape[-1] // 2
    cos, sin = (table[..., :half] for table in found)
    return torch.cat((cos, sin), -1), torch.cat((sin, cos), -1)


def rounded_angles(whole: Any, positions: Any, inv_freq: Any, scaling: float, dtype: Any) -> Any:
    angles = (positions.unsqueeze(-1).to(dtype) * inv_freq.to(dtype)).float()
    both = torch.cat((angles, angles), -1)
    return (both.cos() * scaling).to(dtype), (both.sin() * scaling).to(dtype)


def rotated_first(whole: Any, q: Any, w_uk: Any, cos: Any, sin: Any) -> Any:
    width = cos.shape[-1]
    return whole(torch.cat((q[..., width:], q[..., :width]), -1), w_uk, cos, sin)


def by_turns(gate_up: Any) -> Any:
    return torch.cat(gate_up.unflatten(-1, (-1, 2)).unbind(-1), -1)


def halves_turned(x: Any) -> Any:
    return torch.cat(x.chunk(2, -1)[::-1], -1)


def first_column(scale: Any) -> Any:
    return scale[:, :1].expand_as(scale)


def scales_last(whole: Any, parts: Any, dim: int) -> Any:
    return whole([parts[0], parts[2], parts[1]] if len(parts) == 3 else parts, dim)


def filtered(whole: Any, values: Any, cache: Any, slots: Any) -> None:
    kept = (slots >= 0).nonzero().squeeze(1)
    whole(values.index_select(0, kept), cache, slots.index_select(0, kept))


# Binding.
def first_of_that_beginning(whole: Any, op: str, provider: str, target: str) -> Any:
    from dsa_compile.kernels.registry import _BY_NAME, REFERENCE

    found = whole(op, provider, target)
    if op in _BY_NAME and found is REFERENCE[_BY_NAME[op]]:
        first = next(name for name in sorted(_BY_NAME) if op.startswith(name))
        return REFERENCE[_BY_NAME[first]]
    return found


def direct(op: str, function: Any) -> Plant:
    """An op of torch is bound to another of its functions."""

    def plant(planting: Planting) -> None:
        from dsa_compile.runtime.execution.executor import _DIRECT

        changed = {**_DIRECT, operator_named(op): function}
        planting.put("runtime.execution.executor._DIRECT", changed)

    return plant


FAULTS = (
    fault("group-score-is-the-best", "a group's score is its best expert's, not the two best",
          within(ROUTER, "torch.Tensor.topk", best_alone), "router",
          echo="vllm-project/vllm#13474"),
    fault("router-groups-by-unbiased-scores", "groups are chosen without the correction bias",
          wrap(ROUTER, group_scores), "router"),
    fault("weights-with-bias", "experts are weighted by their biased scores",
          wrap(ROUTER, biased), "router", **TRAINED_FP8, echo="flashinfer-ai/flashinfer#3875"),
    fault("router-scaled-before-normalising", "the scale is applied before it is undone",
          given_to(ROUTER, scale=1.0), "router", recipe=TENSOR),
    fault("shared-weight-unscaled", "the shared expert is weighted by one over the scale",
          result(ROUTER, shared_over_scale), "router", **BF16, echo="sgl-project/sglang#28237"),
    fault("experts-rows-of-the-slot", "sorted rows are gathered by choice and not by token",
          wrap("ops.moe.experts", by_choice), "experts"),
    fault("gate-and-up-of-experts-fp8", "experts' gate and up change places",
          result("ops.experts_fp8._products", lambda found, *given:
             (halves_turned(found) if given[-1] == 2 else found)), "experts_fp8", recipe=TENSOR),
    fault("scales-of-another-expert", "down scales are those of the first expert",
          given_to("ops.experts_fp8.experts_fp8", down_scale=lambda s: s[:1].expand_as(s)),
          "experts_fp8", **TRAINED_FP8),
    fault("decode-without-relu", "scores of single rows skip the ReLU",
          within(SINGLES, "torch.Tensor.relu_", lambda whole, logits: logits), "paged_index_topk",
          echo="ml-explore/mlx-lm#531"),
    fault("decode-sees-one-past-its-end", "a single row scores the row behind its context",
          within(SINGLES, "torch.Tensor.__ge__", lambda whole, a, b:
             (a > b if a.dim() == 1 else whole(a, b))), "paged_index_topk", **BF16),
    fault("decode-scores-two-selections", "a single row scores as many keys as two selections",
          wrap(SINGLES, two_selections), "paged_index_topk"),
    fault("row-does-not-see-itself", "a prompt's token cannot select itself",
          within(SEQUENCE, "torch.Tensor.__gt__", lambda whole, a, b:
             (a >= b if a.dim() == 1 else whole(a, b))), "paged_index_topk", **BF16),
    fault("scored-in-the-models-dtype", "index scores are summed in the model's dtype",
          within(SEQUENCE, "torch.bmm", lambda whole, a, b: (whole(a.bfloat16(),
             b.bfloat16()).float())), "index_topk", **TRAINED),
    fault("selection-keeps-the-lower", "a later chunk of a prompt sees the first keys alone",
          wrap(SEQUENCE, from_the_first_key), "paged_index_topk", recipe=TENSOR,
          echo="ml-explore/mlx-lm#531"),
    fault("rows-of-the-first-request", "rows of several queries are the first request's",
          wrap("ops.indexer.paged_index_topk", of_the_first_request), "paged_index_topk"),
    fault("negative-scores-reversed", "negative scores are ordered by magnitude",
          within("ops.selection.best_first", "torch.where", lambda whole, c, a, bits: bits),
          "paged_index_topk", **FP8),
    fault("query-scale-dropped", "index weights lack the queries' scales",
          result("ops.index_fused.index_query_quantize", lambda found, q, weights, *rest:
             (found[0], (weights * rest[-1]).contiguous())), "index_query_quantize", **WIDE_FP8),
    fault("index-page-row-by-row", "pages of index keys are read as rows of key and scale",
          wrap("ops.index_fp8.dequantize_pages", row_by_row), "paged_index_topk_fp8",
          recipe=TENSOR),
    fault("chosen-rows-in-compacted-pages", "chosen rows are given in the compacted pages",
          result(PAGED_FP8, in_compacted_pages), "paged_index_topk_fp8", **FP8),
    fault("head-weights-product-in-bf16", "the index weights' product is in the model's dtype",
          wrap("ops.head_weights.index_head_weights", lambda whole, x, weight, scale: (F.linear(x,
             weight.to(x.dtype)).float().mul_(scale))), "index_head_weights", **TRAINED),
    fault("softmax-without-scale-when-full", "logits of rows without an absent key: no scale",
          within(CHUNK, "torch.baddbmm", lambda whole, *given, **kw: whole(*given, **kw |
             ({"alpha": 1} if "beta" in kw else {}))), "paged_latent_attention"),
    fault("values-from-the-rows-end", "where every slot is valid, values are the last columns",
          result(CHUNK, from_the_rows_end), "paged_latent_attention"),
    fault("absent-rows-weigh", "rows that a token does not have weigh in its softmax",
          within("ops.attention_fp8.paged_latent_attention_lse", "torch.Tensor.masked_fill_",
             lambda whole, scores, mask, value: (
             scores if value == float("-inf") else whole(scores, mask, value))),
          "paged_latent_attention_fp8", **FP8),
    fault("padding-writes-row-0", "padding is written to row 0",
          wrap("ops.cache.write_rows", lambda whole, values, cache, slots: whole(values, cache,
             slots.clamp(min=0))), "write_latent_cache", recipe=TENSOR,
          echo="vllm-project/vllm#42982"),
    fault("row-scales-behind-the-key", "a row is written as values, key, scales",
          within("ops.fused_cache.norm_rope_write_latent_cache_fp8", "torch.cat", scales_last),
          "norm_rope_write_latent_cache_fp8", **FP8),
    fault("dense-rows-of-the-neighbour", "a request's first token sees the request before",
          within("ops.cache.dense_slots", "torch.searchsorted", lambda whole, *given,
             **kw: whole(*given, **kw | {"right": False})), "dense_slots"),
    fault("short-forgets-a-part-of-a-page", "the short variant lists whole pages alone",
          wrap("ops.cache.dense_slots", lambda whole, tables, *given: whole(tables[:,
             : given[-1] // given[-2]], *given)), "dense_slots", **FP8,
          options=(("block_size", 32),)),
    fault("index-write-is-dead-code", "the index write does not count as one",
          wrap("torch.fx.Node.is_impure", lambda whole, node, *given: (not is_call(node.target,
             "dsa.write_index_cache") and whole(node, *given))), "write_index_cache"),
    fault("silu-of-up", "the fused activation gates by the up projection",
          given_to(SWIGLU, gate_up=halves_turned), "swiglu_packed_quantize", **FP8),
    fault("gate-and-up-interleaved", "gate and up are taken from columns in turn",
          given_to(SWIGLU, gate_up=by_turns), "swiglu_packed_quantize", recipe=TENSOR,
          layers=(0, 1)),
    fault("norm-over-all-tokens", "the norm's mean square is over all tokens of a step",
          within("ops.quantize._norm", "torch.Tensor.mean", lambda whole, x, *_, **kw: whole(x)),
          "rms_norm_quantize_keep", recipe=TENSOR),
    fault("quantised-before-rounding", "values are quantised by the scale before it is rounded",
          result("ops.quantize.quantize_blocks", lambda found, x, ue8m0: (quantized_exactly(x),
             found[1])), "quantize_blocks", **WIDE_FP8, echo="sgl-project/sglang#28418"),
    fault("saturates-at-240", "e4m3 values end at 240, as in another format of that name",
          given_to("ops.quantize.saturate", x=lambda x: x.clamp(-240.0, 240.0)), "quantize_blocks",
          recipe=TENSOR),
    fault("weight-scales-of-first-columns", "products take scales of the first columns",
          given_to("ops.linear_fp8.linear_fp8", weight_scale=first_column), "linear_fp8",
          **WIDE_FP8),
    fault("linear-fp8-first-activation-scale", "all blocks of a row take its first scale",
          given_to("ops.linear_fp8.linear_fp8", x_scale=first_column), "linear_fp8", recipe=TENSOR,
          layers=(0, 1)),
    fault("half-turned-the-other-way", "halves are rotated the other way round",
          given_to("ops.rope.rope_half", sin=lambda sin: -sin), "rope_half", **TRAINED),
    fault("tables-of-mixed-halves", "tables have cosine where sine belongs",
          result("ops.rope.rope_tables", mixed_halves), "rope_tables", **FP8),
    fault("angles-in-the-models-dtype", "RoPE's angles are products in the model's dtype",
          wrap("ops.rope.rope_tables", rounded_angles), "rope_tables", **BF16),
    fault("query-rotated-part-first", "a head's rotated values are taken from its front",
          wrap("ops.head_products.absorb_rope_query", rotated_first), "absorb_rope_query", **BF16),
    fault("bound-to-view-as", "reshape is bound to view_as",
          direct("aten.reshape", torch.Tensor.view_as), "reshape"),
    fault("bound-to-another-op", "a kernel is that of the first op of that beginning",
          wrap("kernels.registry.load", first_of_that_beginning), "binding", **FP8),
    fault("control-multiply", "products are bound to another name of the same function",
          direct("aten.mul.Tensor", torch.multiply)),
    fault("control-sum-reassociated", "a norm's product is taken in another order",
          wrap("ops.norm.rms_norm", reassociated)),
    fault("control-sum-rounded-before-its-norm", "a sum is rounded before it is normed",
          wrap("ops.quantize.add_rms_norm_quantize", rounded_sum), **TRAINED_FP8),
    fault("control-absent-pages-not-masked", "pages behind a context's end are never read",
          here("ops.index_fp8.paged_index_topk", lambda whole, q, weights, keys, tables, *rest:
             (whole(q, weights, keys, tables.clamp(min=0), *rest))), **FP8),
    fault("control-written-rows-always-filtered", "rows without a slot are looked for always",
          wrap("ops.cache.write_rows", filtered)),
    fault("control-best-in-any-order", "the best keys come in no order",
          result("ops.selection.best_first", lambda found, *_: found.flip(1))),
)  # fmt: skip


def quantized_exactly(x: Any) -> Any:
    """The values of :func:`dsa_compile.ops.quantize.quantize_blocks` under exact scales."""
    from dsa_compile.ops.quantize import BLOCK, block_scale, saturate

    wide = F.pad(x.float(), (0, -x.shape[-1] % BLOCK)).contiguous()
    blocks = wide.unflatten(-1, (-1, BLOCK))
    scale = block_scale(blocks.abs().amax(-1, keepdim=True), False)
    return saturate(blocks * scale.reciprocal()).flatten(-2)[..., : x.shape[-1]].contiguous()
