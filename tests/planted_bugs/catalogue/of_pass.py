"""Faults of passes; those of passes that recognise and of whole programs are beside this."""

from dataclasses import replace
from typing import Any

import torch

from dsa_compile.ir.region import Role
from dsa_compile.passes.fuse_add_norm_across_layers import NEXT_NORM
from dsa_compile.weights.plan import Constant, Load, Transpose
from tests.planted_bugs.catalogue.passes_recognise import RECOGNISE
from tests.planted_bugs.catalogue.programs import PROGRAM
from tests.planted_bugs.changes import (
    altered,
    backwards,
    erased,
    given,
    late,
    negated,
    node_of,
    of_kind,
    positions,
    replanned,
    same_twice,
    scaled,
    size,
    swapped,
    taking_args,
    wrong,
)
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import (
    Plant,
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
    program.weights.define(edit.region.kind, NEXT_NORM, entry)
    return edit.input(Role.WEIGHT, NEXT_NORM, entry.shape, entry.torch_dtype)


def loading(change: Any) -> Any:
    """Parts of a merged weight load parameters of another name."""

    def alter(expr: Any) -> Any:
        parts = tuple(replace(part, key=change(part.key)) for part in expr.parts)
        return replace(expr, parts=parts)

    return alter


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
          here("passes.absorb_mla.Reshape", lambda whole, shape, of: Transpose(0, 1,
             whole((shape[1], shape[0], *shape[2:]), of))), "absorb_mla", recipe="fp8"),
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
             replanned("moe", NEXT_NORM, lambda _: Load("model.norm.weight"))),
          "fuse_add_norm_across_layers", model="three", layers=(1,)),
    wrong("latent-key-in-halves", "the cached key is rotated in halves",
          "quantize_latent_cache", "dsa.norm_rope_write_latent_cache_fp8", given(5, False),
          recipe="fp8"),
    wrong("latent-key-in-halves-in-dense", "the same in dense layers alone",
          "quantize_latent_cache", "dsa.norm_rope_write_latent_cache_fp8", given(5, False),
          region="dense", recipe="fp8", layers=(0, 1)),
    wrong("latent-row-tables-swapped", "the cached key is rotated by swapped tables",
          "quantize_latent_cache", "dsa.norm_rope_write_latent_cache_fp8_tensor",
          swapped(3, 4), recipe=TENSOR),
    wrong("kv-scale-half-as-much-again", "rows under one scale are read under a larger one",
          "quantize_latent_cache", "dsa.paged_latent_attention_fp8_tensor",
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
             "self_attn.o_proj.weight_scale_inv", lambda _: Constant("float32", (1, 1), (1.0,)))),
          "quantize_projections", recipe="fp8", model="three"),
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
