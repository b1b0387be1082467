"""Faults of passes, and of what all passes use: the editor, patterns, plans, the export."""

from dataclasses import replace
from typing import Any

import torch

from tests.planted_bugs.changes import (
    altered,
    backwards,
    call_with,
    called,
    erased,
    exported,
    given,
    input_of,
    late,
    negated,
    node_of,
    of_kind,
    positions,
    replan,
    replanned,
    same_twice,
    scaled,
    size,
    swapped,
    taking_args,
    where,
)
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import (
    Plant,
    Planting,
    afterwards,
    here,
    inserting,
    operator_named,
    result,
    taking,
    within,
    wrap,
)

ADD_NORMS = "fuse_add_norm fuse_add_norm_across_layers"
Q_A = "self_attn.q_a_k_kv_a.weight"
BOTH = "mlp.experts.down_proj_and_shared"
TENSOR = "fp8-kv-tensor"
EXPAND, SPLIT = "expand_prompt_attention", "split_prompts"


def wrong(
    id: str,
    about: str,
    name: str,
    op: str,
    change: Any,
    region: str = "",
    path: str = "",
    **given: Any,
) -> Fault:
    """A fault of a pass that inserts calls of ``op`` wrongly."""
    plant = inserting(name, op, change, region=region, path=path)
    return Fault(id, about, plant, name.split()[0], **given)


RECOGNISE = (
    wrong("eps-of-every-norm", "eps of every norm", "recognize_rms_norm", "dsa.rms_norm",
          scaled(2, 1e3), model="three"),
    wrong("eps-of-one-norm", "eps of one norm", "recognize_rms_norm", "dsa.rms_norm",
          scaled(2, 1e4), region="moe", path="post_attention_layernorm", model="three"),
    wrong("another-norms-weight", "a norm takes the weight of the one before",
          "recognize_rms_norm", "dsa.rms_norm", given(1, input_of("input_layernorm.weight")),
          region="dense", path="post_attention_layernorm", model="three"),
    wrong("eps-of-the-index-keys-norm", "eps of the index key's norm",
          "recognize_layer_norm", "dsa.layer_norm", scaled(3, 1e5), region="moe", model="three"),
    wrong("factor-on-rope-tables", "RoPE's tables are a hundredth too large",
          "recognize_rope_tables", "dsa.rope_tables", scaled(2, 1.01), model="three"),
    Fault("rope-tables-swapped", "cosine and sine change places",
          taking("recognize_rope_tables", lambda index, name: (1 - index, name)),
          "recognize_rope_tables"),
    wrong("rope-cos-and-sin-exchanged", "latents are rotated by exchanged tables",
          "recognize_rope_interleaved", "dsa.rope_interleaved", swapped(1, 2), region="moe",
          model="three"),
    wrong("rope-in-the-other-layout", "latents are rotated in halves",
          "recognize_rope_interleaved", "dsa.rope_interleaved", called("dsa.rope_half"),
          region="dense", model="three"),
    wrong("rope-key-tables-swapped", "the shared key is rotated by swapped tables",
          "recognize_rope_interleaved", "dsa.rope_interleaved",
          where(lambda edit, args: size(args[0], 2) == 1, swapped(1, 2)), recipe="bf16"),
    wrong("indexers-rope-in-the-other-layout", "the indexer rotates neighbours in MoE layers",
          "recognize_rope_half", "dsa.rope_half", called("dsa.rope_interleaved"), region="moe",
          model="three"),
    wrong("recognize-half-key-interleaved", "the indexer's key alone is rotated in neighbours",
          "recognize_rope_half", "dsa.rope_half",
          where(lambda edit, args: size(args[0], 2) == 1, called("dsa.rope_interleaved")),
          echo="vllm-project/vllm-ascend#7341"),
    wrong("recognize-half-all-interleaved", "the indexer's queries and keys, in neighbours",
          "recognize_rope_half", "dsa.rope_half", called("dsa.rope_interleaved"), recipe="bf16",
          model="trained", echo="sgl-project/sglang#13495"),
    wrong("router-scaled-twice", "the routed scaling factor is applied twice",
          "recognize_router", "dsa.router", altered(7, lambda s: s * s),
          echo="vllm-project/vllm#24119"),
    wrong("router-without-its-scale", "the scale of the routed experts is dropped",
          "recognize_router", "dsa.router", given(7, 1.0), model="three"),
    wrong("a-group-too-many", "a group of experts too many is kept",
          "recognize_router", "dsa.router", given(4, 3), model="three"),
    wrong("router-groups-swapped", "the number of groups and of those kept change places",
          "recognize_router", "dsa.router", swapped(3, 4), recipe="bf16"),
    wrong("router-not-normalised", "the chosen weights are not divided by their sum",
          "recognize_router", "dsa.router", given(6, False), recipe=TENSOR,
          echo="NVIDIA/TensorRT-Model-Connect#669"),
    Fault("gate-and-up-of-experts-exchanged", "gate and up of the experts are exchanged",
          afterwards("passes.recognize_experts.RecognizeExperts.rewrite", replanned("moe",
             "mlp.experts.gate_up_proj", lambda expr: halves_exchanged(expr))), "recognize_experts",
          model="three"),
    Fault("experts-transposed", "the experts' matrices are transposed",
          afterwards("passes.recognize_experts.RecognizeExperts.rewrite", replanned("moe",
             "mlp.experts.gate_up_proj", lambda expr: turned(1, 2, expr))), "recognize_experts",
          model="three"),
    wrong("gate-and-up-exchanged", "gate and up of a dense MLP are exchanged",
          "recognize_swiglu", "dsa.swiglu", swapped(0, 1), region="dense", model="three"),
    wrong("up-with-the-gates-weight", "the up projection takes the gate's weight",
          "recognize_linear", "dsa.linear",
          given(1, input_of("mlp.shared_experts.gate_proj.weight")), region="moe",
          path="shared_experts.up_proj", model="three"),
    wrong("scale-of-attention", "the scale of attention is off by two hundredths",
          "recognize_sparse_attention", "dsa.sparse_attention", scaled(4, 1.02), region="moe",
          model="three"),
    wrong("sparse-values-are-keys", "attention's keys and values change places",
          "recognize_sparse_attention", "dsa.sparse_attention", swapped(1, 2), recipe="bf16"),
    wrong("sparse-scale-of-the-indexer", "attention takes the indexer's scale",
          "recognize_sparse_attention", "dsa.sparse_attention",
          given(4, lambda edit: node_of(edit, "dsa.index_topk").args[4]), recipe=TENSOR,
          echo="NVIDIA/Megatron-LM#1429"),
    wrong("a-key-too-few", "attention sees a key too few",
          "recognize_sparse_attention", "dsa.index_topk", given(3, 15), region="dense",
          model="three"),
    Fault("control-index-scale-doubled", "a positive factor on index scores: the same keys",
          inserting("recognize_sparse_attention", "dsa.index_topk", scaled(4, 2.0))),
    wrong("buffer-filled-backwards", "what filled a buffer is joined in reverse",
          "functionalize", "aten.cat", altered(0, lambda parts: parts[::-1])),
    Fault("strided-slices-stripped", "slices of every other value are taken for whole ones",
          here("passes.strip_noise.argument", lambda whole, node,
             name: 1 if name == "step" else whole(node, name)), "strip_noise"),
)  # fmt: skip


def halves_exchanged(expr: Any) -> Any:
    """Gate and up rows of every expert, 64 of each."""
    from dsa_compile.weights.plan import Concat, Narrow

    return Concat(1, (Narrow(1, 64, 64, expr), Narrow(1, 0, 64, expr)))


def turned(a: int, b: int, expr: Any) -> Any:
    from dsa_compile.weights.plan import Transpose

    return Transpose(a, b, expr)


def narrowed(start: Any) -> Plant:
    """``absorb_mla`` cuts a head's rows from ``start(right, length, rows)`` on."""
    return here(
        "passes.absorb_mla.Narrow",
        lambda whole, dim, at, n, of: whole(dim, start(at, n, of.shape[1]), n, of),
    )


def without_mscale(query: Any, q_pe: Any, *rest: Any) -> Any:
    width = size(query.args[0], -1) + size(q_pe, -1)
    return (query, q_pe, *rest[:-1], float(width) ** -0.5)


def exchange_variants(_: Any, self: Any, program: Any, record: Any) -> None:
    """Graphs of the long and the short regions change places."""
    for region in program.regions.values():
        if region.name.endswith(".long"):
            other = program.regions[region.name.replace(".long", ".short")]
            for name in ("graph", "outputs"):
                mine, its = getattr(region, name), getattr(other, name)
                setattr(region, name, its)
                setattr(other, name, mine)


def flat_exchanged(_: Any, self: Any, program: Any, record: Any) -> None:
    graph = program.regions["moe"].graph
    node = next(n for n in graph.nodes if str(n.target) == "dsa.swiglu.default")
    node.args = node.args[::-1]


def keeps_own_norm(whole: Any, edit: Any, program: Any, entry: Any) -> Any:
    from dsa_compile.ir.region import Role
    from dsa_compile.passes.fuse_add_norm_across_layers import NEXT_NORM

    program.weights.define(edit.region.kind, NEXT_NORM, entry)
    return edit.input(Role.WEIGHT, NEXT_NORM, entry.shape, entry.torch_dtype)


def loading(change: Any) -> Any:
    """Parts of a merged weight load parameters of another name."""

    def alter(expr: Any) -> Any:
        parts = tuple(replace(part, key=change(part.key)) for part in expr.parts)
        return replace(expr, parts=parts)

    return alter


def model_norm(expr: Any) -> Any:
    from dsa_compile.weights.plan import Load

    return Load("model.norm.weight")


def equal_parts(rows: list[int]) -> list[int]:
    return [sum(rows) // len(rows)] * len(rows)


MERGE = "passes.merge_projections."
SHORT = "passes.split_short_long.SplitShortLong."
PAGED = "passes.insert_paged_caches.InsertPagedCaches._attend"
INDEX_WRITE, INDEX_READ = "dsa.write_index_cache", "dsa.paged_index_topk"
LATENT_WRITE, LATENT_READ = "dsa.write_latent_cache", "dsa.paged_latent_attention"

RESTRUCTURE = (
    wrong("pieces-of-a-split-exchanged", "pieces of a split are exchanged",
          "token_major", "getitem", altered(1, lambda index: 1 - index), region="moe",
          model="three"),
    Fault("absorb-values-from-row-0", "the value matrix is cut from a head's first rows",
          narrowed(lambda at, n, rows: 0), "absorb_mla", recipe="bf16"),
    Fault("absorb-values-before-keys", "the values' rows of kv_b are taken for the keys'",
          narrowed(lambda at, n, rows: 0 if at else rows - n), "absorb_mla", recipe="bf16"),
    Fault("values-begin-a-row-early", "value rows of a head begin with its last key row",
          narrowed(lambda at, n, rows: at - 1 if at else 0), "absorb_mla", recipe="bf16"),
    Fault("absorb-head-minor", "the rows of kv_b are taken to be of all heads in turn",
          here("passes.absorb_mla.Reshape", lambda whole, shape, of: turned(0, 1, whole((shape[1],
             shape[0], *shape[2:]), of))), "absorb_mla", recipe="fp8"),
    wrong("absorb-scale-of-moe", "MoE layers' softmax scale is a tenth off",
          "absorb_mla", "dsa.latent_attention", scaled(5, 1.1), region="moe", recipe=TENSOR,
          layers=(2, 3)),
    wrong("scale-of-absorbed-attention", "the same, by two hundredths",
          "absorb_mla", "dsa.latent_attention", scaled(5, 0.98), region="moe", model="three"),
    wrong("absorb-scale-without-mscale", "the softmax scale lacks the square of YaRN's mscale",
          "absorb_mla", "dsa.latent_attention", taking_args(without_mscale),
          echo="onnxruntime/mobius#548"),
    Fault("operands-exchanged-in-flattening", "gate and up are exchanged where tokens are flat",
          result("passes.flatten_tokens.FlattenTokens.run", flat_exchanged), "flatten_tokens",
          model="three", site=1),
    wrong("latent-row-swapped", "a row has the rotated key first",
          "insert_paged_caches", LATENT_WRITE, swapped(0, 1)),
    wrong("halves-of-the-latent-row-exchanged", "the same in MoE layers alone",
          "insert_paged_caches", LATENT_WRITE, swapped(0, 1), region="moe", model="three"),
    Fault("index-read-before-write", "keys are scored before this step's are written",
          afterwards(PAGED, of_kind("", late(INDEX_WRITE, INDEX_READ))), "insert_paged_caches",
          recipe="bf16"),
    Fault("stale-index-keys-of-moe", "the same in MoE layers alone",
          afterwards(PAGED, of_kind("moe", late(INDEX_WRITE, INDEX_READ))), "insert_paged_caches",
          model="three"),
    Fault("latent-read-before-write", "attention reads before this step's rows are in the cache",
          afterwards(PAGED, of_kind("", late(LATENT_WRITE, LATENT_READ))), "insert_paged_caches"),
    wrong("latent-rows-by-position", "latent rows are written by position",
          "insert_paged_caches", LATENT_WRITE, given(3, positions), region="dense", model="three"),
    Fault("latent-rows-not-written", "latent rows of MoE layers are not written",
          afterwards(PAGED, of_kind("moe", erased(LATENT_WRITE))), "insert_paged_caches",
          model="three"),
    wrong("index-keys-by-position", "index keys are written to the row of their position",
          "insert_paged_caches", INDEX_WRITE, given(2, positions), recipe="bf16"),
    Fault("merge-gate-and-up-swapped", "merged weights of gate and up have the up rows first",
          here(MERGE + "Concat", lambda whole, dim, parts: whole(dim,
             parts if len(parts) > 2 else parts[::-1])), "merge_projections", recipe="fp8"),
    Fault("merge-low-ranks-reversed", "the merged low ranks' rows are stacked in reverse",
          here(MERGE + "Concat", lambda whole, dim, parts: whole(dim,
             parts[::-1] if len(parts) > 2 else parts)), "merge_projections"),
    Fault("merged-weight-backwards", "the dense MLP's merged weight has the up rows first",
          afterwards(MERGE + "MergeProjections._merge", replanned("dense",
             "mlp.gate_up_proj.weight", backwards)), "merge_projections", model="three"),
    Fault("merged-weight-of-another-layer", "MoE layers take layer 1's merged weight",
          afterwards(MERGE + "MergeProjections._merge", replanned("moe", Q_A,
             loading(lambda key: key.replace("{layer}", "model.layers.1")))), "merge_projections",
          model="three", layers=(2,)),
    Fault("merge-shared-gate-and-up-swapped", "the shared expert's merged weight, up rows first",
          afterwards(MERGE + "MergeProjections._merge", replanned("moe",
             "mlp.shared_experts.gate_up_proj.weight", backwards)), "merge_projections",
          recipe="bf16", model="trained"),
    wrong("merge-split-by-first-rows", "a split's sizes are those of equal parts",
          "merge_projections", "aten.split_with_sizes", altered(1, equal_parts)),
    Fault("control-merged-in-another-order", "merged low ranks in another order, weight and split",
          result(MERGE + "first_projections", lambda found, *_: {key: parts[::-1] for key,
             parts in found.items()}), recipe="bf16"),
    Fault("shared-expert-first", "the shared expert is stacked before the routed ones",
          here("passes.merge_shared_expert.Concat", lambda whole, dim, parts: whole(dim,
             parts[::-1])), "merge_shared_expert", recipe="bf16", site=1),
    Fault("shared-down-first", "the same of the down projections alone",
          afterwards("passes.merge_shared_expert.MergeSharedExpert._merge", replanned("moe", BOTH,
             backwards)), "merge_shared_expert", model="three"),
    wrong("experts-take-weights-for-indices", "experts take indices for weights",
          "merge_shared_expert", "dsa.experts", swapped(1, 2)),
    wrong("router-remade-without-its-scale", "the router with the shared expert has no scale",
          "merge_shared_expert", "dsa.router", given(7, 1.0), layers=(2, 3)),
    wrong("select-first-row", "a step has the logits of its first row alone",
          "select_logit_rows", "aten.index_select",
          lambda edit, op, args: (operator_named("aten.slice.Tensor"), (args[0], 0, 0, 1))),
    wrong("rows-of-logits-by-position", "rows of logits are taken by position",
          "select_logit_rows", "aten.index_select", given(2, positions), model="three"),
    Fault("short-writes-no-index-keys", "the short variant leaves out the indexer's keys",
          afterwards(SHORT + "_layer", of_kind("", erased(INDEX_WRITE))), "split_short_long",
          recipe="bf16"),
    Fault("short-moe-writes-no-index-keys", "the short variant of MoE layers leaves them out",
          afterwards(SHORT + "_layer", of_kind("moe", erased(INDEX_WRITE))), "split_short_long",
          recipe="bf16", layers=(2, 3)),
    wrong("dense-rows-swapped-sizes", "the short variant's rows: page size for width",
          "split_short_long", "dsa.dense_slots", swapped(4, 5), recipe="fp8", model="trained-fp8"),
    wrong("rows-of-another-page-size", "the short variant takes pages for half as large",
          "split_short_long", "dsa.dense_slots", given(4, 8), model="three"),
    Fault("long-variant-rewritten", "long lists rows, short scores",
          result(SHORT + "run", exchange_variants), "split_short_long"),
    Fault("prompts-write-no-index-keys", "prompt regions of MoE layers write no index keys",
          result("passes.split_prompts.SplitPrompts.run", lambda _, self, program,
             record: erase_index_write(program)), SPLIT, model="three", site=1),
    wrong("prompts-take-positions-for-slots", "attention of prompts: positions for slots",
          EXPAND, "dsa.paged_prompt_attention", swapped(3, 4), region="moe", model="three"),
    wrong("prompts-selection-left-out", "long prompts attend to all tokens",
          EXPAND, "dsa.paged_prompt_attention", taking_args(lambda *args: args[:-1]),
          region="moe.long_prompt", model="three"),
    wrong("scale-of-prompts", "attention's scale in prompts is a hundredth off",
          EXPAND, "dsa.paged_prompt_attention", scaled(7, 1.01), region="moe", model="three"),
    wrong("angles-of-prompts", "prompts are rotated by exchanged tables",
          EXPAND, "dsa.rope_interleaved", swapped(1, 2), region="moe", model="three"),
    wrong("scale-of-prompts-fp8", "attention's scale in prompts over FP8 is a tenth off",
          EXPAND, "dsa.paged_prompt_attention_fp8", scaled(7, 1.1), region="moe", recipe="fp8",
          model="three"),
)  # fmt: skip


def erase_index_write(program: Any) -> None:
    graph = program.regions["moe.prompt"].graph
    graph.erase_node(next(n for n in graph.nodes if str(n.target) == INDEX_WRITE + ".default"))


def scale_constant(expr: Any) -> Any:
    from dsa_compile.weights.plan import Constant

    return Constant("float32", (1, 1), (1.0,))


def half_as_much_again(edit: Any, op: Any, args: Any) -> Any:
    """The scale of the cache, which attention takes last."""
    at = node_of(edit, LATENT_READ)
    more = edit.call(torch.ops.aten.mul.Tensor, args[-1], 1.5, before=at)
    return op, (*args[:-1], more)


FUSE = (
    wrong("rope-absorb-tables-swapped", "queries are rotated by swapped tables",
          "fuse_rope_absorb", "dsa.absorb_rope_query", swapped(2, 3), recipe=TENSOR),
    wrong("angles-of-fused-queries", "the same in MoE layers alone",
          "fuse_rope_absorb", "dsa.absorb_rope_query", swapped(2, 3), region="moe", model="three"),
    wrong("head-weights-negated", "the indexer's head weights change their sign",
          "fuse_index_weights", "dsa.index_head_weights", scaled(2, -1.0), recipe=TENSOR),
    wrong("head-weights-negated-in-dense", "the same in dense layers alone",
          "fuse_index_weights", "dsa.index_head_weights", scaled(2, -1.0), region="dense",
          model="three"),
    wrong("add-norm-adds-twice", "the stream is added to itself",
          ADD_NORMS, "dsa.add_rms_norm", same_twice, recipe="bf16", model="trained"),
    wrong("wrong-residual", "the branch's output is added to itself in MoE layers",
          "fuse_add_norm", "dsa.add_rms_norm", taking_args(lambda x, _, *rest: (x, x, *rest)),
          region="moe", model="three"),
    Fault("add-norm-results-swapped", "the sum and its norm change places",
          taking(ADD_NORMS, lambda index, name: (1 - index, name)), "fuse_add_norm"),
    wrong("add-norm-eps-of-the-sum", "epsilon is for a sum of squares instead of their mean",
          ADD_NORMS, "dsa.add_rms_norm", taking_args(lambda x, residual, weight, eps: (
              x, residual, weight, eps * size(weight, 0)))),
    wrong("add-norm-eps-of-dense", "dense layers' norm takes ten thousand times its epsilon",
          "fuse_add_norm", "dsa.add_rms_norm", scaled(3, 1e4), region="dense", layers=(0, 1)),
    Fault("control-summands-exchanged", "the two summands of a fused addition change places",
          inserting(ADD_NORMS, "dsa.add_rms_norm", swapped(0, 1)), recipe="bf16", model="trained"),
    Fault("control-other-names", "temporaries of a fusion have other names",
          taking(ADD_NORMS, lambda index, name: (index, name[0])), recipe="bf16"),
    Fault("moved-norm-keeps-its-weight", "the norm behind a layer keeps that layer's weight",
          within("passes.fuse_add_norm_across_layers.FuseAddNormAcrossLayers._close",
             "passes.fuse_add_norm_across_layers._next_norm", keeps_own_norm),
          "fuse_add_norm_across_layers", recipe="bf16"),
    Fault("next-norm-of-the-model", "every MoE layer's next norm is the model's",
          afterwards("passes.fuse_add_norm_across_layers.FuseAddNormAcrossLayers._close",
             replanned("moe", "next_norm.weight", model_norm)), "fuse_add_norm_across_layers",
          model="three", layers=(1,)),
    wrong("latent-key-in-halves", "the cached key is rotated in halves",
          "quantize_latent_cache", "dsa.norm_rope_write_latent_cache_fp8", given(5, False),
          recipe="fp8"),
    wrong("latent-key-in-halves-in-dense", "the same in dense layers alone",
          "quantize_latent_cache", "dsa.norm_rope_write_latent_cache_fp8", given(5, False),
          region="dense", recipe="fp8", layers=(0, 1)),
    wrong("latent-row-tables-swapped", "the cached key is rotated by swapped tables",
          "quantize_latent_cache_tensor", "dsa.norm_rope_write_latent_cache_fp8_tensor",
          swapped(3, 4), recipe=TENSOR),
    wrong("kv-scale-half-as-much-again", "rows under one scale are read under a larger one",
          "quantize_latent_cache_tensor", "dsa.paged_latent_attention_fp8_tensor",
          half_as_much_again, recipe=TENSOR),
    Fault("residual-is-the-norm", "the residual stream goes on with the norm",
          taking("fuse_add_norm_quantize", lambda index, name: (0 if name == "residual" else index,
             name)), "fuse_add_norm_quantize", recipe="fp8"),
    wrong("wrong-residual-quantised", "the same operand twice in a norm that quantises",
          "fuse_add_norm_quantize", "dsa.add_rms_norm_quantize",
          taking_args(lambda x, _, *rest: (x, x, *rest)), region="dense", recipe="fp8",
          model="three"),
    wrong("eps-of-a-norm-that-quantises", "eps of a norm that quantises",
          "fuse_norm_quantize", "dsa.rms_norm_quantize", scaled(2, 1e2), region="moe", recipe="fp8",
          model="three"),
    wrong("attention-inputs-pairings-swapped", "latent and index keys take each other's pairing",
          "fuse_attention_inputs", "dsa.attention_inputs_fp8", swapped(10, 11), recipe=TENSOR),
    wrong("pairings-swapped-in-moe", "the same in MoE layers alone",
          "fuse_attention_inputs", "dsa.attention_inputs_fp8", swapped(10, 11), region="moe",
          recipe="fp8", model="three"),
    wrong("skip-padding-drops-shared", "the router that knows padding forgets the shared expert",
          "skip_padding", "dsa.router", given(8, 0), recipe="fp8", model="wide-fp8",
          echo="sgl-project/sglang#38963"),
    wrong("skip-padding-drops-scale", "the router that knows padding forgets the scale",
          "skip_padding", "dsa.router", given(7, 1.0), recipe="fp8", model="three"),
    wrong("skip-padding-forgets-groups", "the router that knows padding has one group",
          "skip_padding", "dsa.router", taking_args(lambda *args: (*args[:3], 1, 1, *args[5:])),
          recipe=TENSOR),
    Fault("parts-keep-torn-blocks", "parts keep blocks though none begins one of the whole",
          wrap("passes.quantized_weights._begin_blocks", lambda whole, rows,
             stacked: stacked <= 1 or whole(rows, stacked)), "quantize_projections", recipe="fp8"),
    Fault("quantised-weight-without-scale", "the scale of a quantised weight is dropped",
          afterwards("passes.quantize_projections.QuantizeProjections.rewrite", replanned("moe",
             "self_attn.o_proj.weight_scale_inv", scale_constant)), "quantize_projections",
          recipe="fp8", model="three"),
    wrong("activation-scales-not-ue8m0", "activations of an ue8m0 model take exact scales",
          "quantize_projections", "dsa.quantize_blocks", negated(1), recipe="fp8", model="wide-fp8",
          echo="sgl-project/sglang#39193"),
    Fault("gate-and-up-share-blocks", "gate and up are quantised as one matrix",
          here("passes.quantize_experts.quantized_inputs", lambda whole, edit, program, key,
             **_: whole(edit, program, key)), "quantize_experts", recipe=TENSOR),
    Fault("scales-of-the-next-expert", "the shared expert's scales come before the others'",
          afterwards("passes.quantize_experts.QuantizeExperts.rewrite", replanned("moe",
             f"{BOTH}_scale_inv", backwards)), "quantize_experts", recipe="fp8", model="three"),
    wrong("swiglu-quantised-exactly", "the fused activation takes exact scales, not ue8m0",
          "fuse_swiglu_quantize", "dsa.swiglu_packed_quantize", given(1, False), recipe="fp8",
          model="wide-fp8"),
    wrong("expand-takes-exact-scales", "attention's result is quantised under exact scales",
          "fuse_expand_quantize", "dsa.expand_output_quantize", negated(2), recipe="fp8",
          model="wide-fp8"),
    wrong("index-key-interleaved-fp8", "the cached index key is rotated in neighbours",
          "quantize_indexer", "dsa.write_index_key_fp8", negated(6), recipe="fp8",
          echo="vllm-project/vllm-ascend#7859"),
    wrong("index-key-interleaved-in-moe", "the same in MoE layers alone",
          "quantize_indexer", "dsa.write_index_key_fp8", given(6, True), region="moe", recipe="fp8",
          model="three"),
    wrong("index-query-interleaved-fp8", "index queries are rotated in neighbours",
          "quantize_indexer", "dsa.index_query_quantize", negated(4), recipe=TENSOR,
          echo="sgl-project/sglang#30342"),
    wrong("key-norm-bias-for-weight", "weight and bias of the index key's norm change places",
          "quantize_indexer", "dsa.write_index_key_fp8", swapped(1, 2), recipe="fp8"),
)  # fmt: skip


# What all passes use, and what they start at.
def duplicates_by_nodes(whole: Any, edit: Any) -> None:
    """Keep one of calls whose nodes are the same, whatever their constants."""
    seen: dict[Any, Any] = {}
    for node in list(edit.graph.nodes):
        if node.op == "call_function" and not node.is_impure():
            first = seen.setdefault((node.target, str(node.all_input_nodes)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                edit.graph.erase_node(node)


def results_in(order: Any, names_too: bool) -> Plant:
    """A result that is to follow another stands where ``order(results, its place)`` puts it."""

    def returns(whole: Any, edit: Any, name: str, node: Any, after: str | None = None) -> None:
        new = name not in edit.region.outputs and after is not None
        whole(edit, name, node, after)
        if new:
            at = edit.region.outputs.index(name)
            output = edit.graph.output_node()
            output.args = (tuple(order(list(output.args[0]), at)),)
            if names_too:
                edit.region.outputs = tuple(order(list(edit.region.outputs), at))

    return wrap("ir.edit.Editor.returns", returns)


def at_the_end(items: list[Any], at: int) -> list[Any]:
    return [*items[:at], *items[at + 1 :], items[at]]


def one_before(items: list[Any], at: int) -> list[Any]:
    return [*items[: at - 1], items[at], items[at - 1], *items[at + 1 :]]


def kinds_share_weights(homes: Any, calls: Any, plan: Any) -> Any:
    from dsa_compile.weights.sharing import Home

    first: dict[Any, Any] = {}
    return {
        call.name: {
            key: first.setdefault((call.kind, key), Home(call.name, key))
            for key in homes[call.name]
        }
        for call in calls
    }


def three_digits(whole: Any, value: Any) -> Any:
    number = isinstance(value, float) and abs(value) < float("inf")
    return float(f"{value:.3g}") if number else whole(value)


class _Kept(list[Any]):
    def copy(self) -> "_Kept":
        return self


def keep_arguments(_: None, call: Any, *args: Any) -> None:
    call._arguments = _Kept(call._arguments)


def of_the_base_alone(found: Any, architecture: Any, config: Any, *_: Any) -> Any:
    """RoPE's frequencies without YaRN."""
    width = config.qk_rope_head_dim
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    return replace(found, inv_freq=float(config.rope_parameters["rope_theta"]) ** -steps)


def layer_plan(change: Any) -> Plant:
    """The layers of the exported program's plan are others."""

    def changed(program: Any) -> None:
        plan = program.plans["model"]
        layers = tuple(change([call for call in plan.calls if call.layer is not None]))
        calls = (plan.calls[0], *layers, plan.calls[-1])
        program.plans = {**program.plans, "model": replace(plan, calls=calls)}

    return exported(changed)


def at_layer(index: int, **strings: str) -> Any:
    return call_with(lambda call: call.layer == index, **strings)


def reversed_operands(planting: Planting) -> None:
    planting.wrap("ir.match._first", lambda whole, tries: whole(reversed(list(tries))))


MODEL_PLAN = "frontend.build.model_plan"
PROGRAM = (
    Fault("sweep-drops-writes", "dead code takes writes of caches along",
          within("ir.edit.Editor.sweep", "torch.fx.Graph.eliminate_dead_code", lambda whole,
             graph: whole(graph, lambda node: node.op in ("placeholder", "output"))), "sweep",
          "program"),
    Fault("writing-stops-early", "a step without results leaves out the last layer's cache",
          result("ir.plan.Plan.writing", lambda found, *_: found[:-1]), "writing", "program",
          recipe="bf16", layers=(3,), hidden_by="max_batched_tokens=2048"),
    Fault("next-norm-of-last-but-one", "the layer before the last takes the final norm too",
          replan(MODEL_PLAN, "", at_layer(2, next_norm="model.norm")), "model_plan", "program",
          recipe="bf16", layers=(2,), exports=True),
    Fault("first-norm-of-the-second-layer", "the prologue opens with the second layer's norm",
          replan(MODEL_PLAN, "", call_with(lambda call: call.kind == "embed",
             next_norm="model.layers.1.input_layernorm")), "model_plan", "program", recipe="bf16",
          exports=True),
    Fault("layers-share-caches", "all layers write the rows of the first layer's caches",
          replan(MODEL_PLAN, "", lambda call: replace(call, caches=call.caches and "layer_000")),
          "model_plan", "program", recipe="fp8", exports=True),
    Fault("a-layer-skipped", "layer 1 is left out",
          layer_plan(lambda layers: [call for call in layers if call.layer != 1]), "plan",
          "program", model="three", layers=(1,)),
    Fault("weights-of-another-layer", "layer 2 has the weights of layer 1",
          layer_plan(lambda layers: map(at_layer(2, layer="model.layers.1"), layers)), "plan",
          "program", model="three", layers=(2,)),
    Fault("next-norm-of-one-layer", "layer 1 is followed by the model's norm",
          layer_plan(lambda layers: map(at_layer(1, next_norm="model.norm"), layers)), "plan",
          "program", model="three", layers=(1,)),
    Fault("reroute-skips-the-rest", "a rerouted value keeps its last user",
          within("ir.edit.Editor.reroute", "torch.fx.Node.replace_all_uses_with", lambda whole,
             old, new, delete_user_cb: whole(old, new,
             lambda user: delete_user_cb(user) and len(user.users) > 1)), "reroute", "program"),
    Fault("duplicates-by-nodes-alone", "calls that differ in a constant count as duplicates",
          wrap("ir.edit.Editor.merge_duplicates", duplicates_by_nodes), "merge_duplicates",
          "program", recipe="fp8"),
    Fault("results-appended", "a new result is named in the middle and stands at the end",
          results_in(at_the_end, names_too=False), "returns", "program"),
    Fault("control-results-before", "a new result comes before the one it is said to follow",
          results_in(one_before, names_too=True), where="program", recipe="fp8"),
    Fault("weights-of-first-of-kind", "calls of one kind share the weights of the first",
          result("weights.sharing.weight_homes", kinds_share_weights), "weight_homes", "program"),
    Fault("floats-in-three-digits", "numbers of a graph are written with three digits",
          wrap("ir.argument_json.encode", three_digits), "argument_json", "program"),
    Fault("control-arguments-in-place", "a call's arguments are kept between runs",
          result("ir.execution.BoundCall.__init__", keep_arguments), where="program"),
    Fault("an-indexer-promised-everywhere", "passes promise an indexer in every layer",
          wrap("passes.shared.each_indexer", lambda whole, program, region, count=1:
             (count if program.layer_kind(region) else 0)), "each_indexer", "program",
          recipe="bf16", model="glm"),
    Fault("control-swapped-order-first", "of operands that commute the swapped come first",
          reversed_operands, where="program", recipe=TENSOR),
    Fault("frequencies-without-yarn", "YaRN's interpolation of RoPE's frequencies is forgotten",
          result("frontend.reference.build_reference", of_the_base_alone), "build_reference",
          "program", exports=True),
)  # fmt: skip

_REUSING = (
    *("eps-of-one-norm", "rope-cos-and-sin-exchanged", "router-not-normalised", "a-key-too-few"),
    *("stale-index-keys-of-moe", "latent-rows-by-position"),
)
GLM = tuple(  # a layer of which reuses a selection
    replace(fault, id=f"{fault.id}-glm", model="three-glm", recipe="fp32")
    for fault in (*RECOGNISE, *RESTRUCTURE)
    if fault.id in _REUSING
)
FAULTS = (*RECOGNISE, *RESTRUCTURE, *FUSE, *PROGRAM, *GLM)
