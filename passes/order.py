"""The order of all passes, and the levels between them, in capitals.

A pass is named as its module, which has its class: ``fuse_add_norm`` is ``FuseAddNorm``.
"""


def class_name(module: str) -> str:
    """Name of the class of the pass in a module."""
    return "".join(map(str.capitalize, module.split("_")))


ORDER = (
    # clean: what export adds and the reference does in place
    "strip_noise",
    "functionalize",
    "strip_expert_sentinels",
    "broadcast_outer_product",
    # recognise: the only passes that look at aten arithmetic
    "recognize_embedding",
    "recognize_rms_norm",
    "recognize_layer_norm",
    "recognize_rope_tables",
    "recognize_rope_interleaved",
    "recognize_rope_half",
    "recognize_query_scale",
    "recognize_router",
    "recognize_experts",
    "recognize_swiglu",
    "recognize_linear",
    "recognize_sparse_attention",
    "LOGICAL",
    # restructure: the shapes and the state that serving needs
    "token_major",
    "hoist_query_scale",
    "absorb_mla",
    "flatten_tokens",
    "insert_paged_caches",
    # place: on the ranks of a layout, before weights are merged and quantised
    "place",
    # fuse
    "merge_projections",
    "pack_swiglu",
    "merge_shared_expert",
    "fuse_rope_absorb",
    "fuse_index_weights",
    "fuse_add_norm",
    "fuse_add_norm_across_layers",
    # quantise: recipes fp8 and fp8-kv-tensor
    "quantize_projections",
    "quantize_experts",
    "gather_quantized",
    "quantize_latent_cache",
    "quantize_indexer",
    "fuse_norm_quantize",
    "fuse_add_norm_quantize",
    "fuse_swiglu_quantize",
    "fuse_norm_quantize_across_layers",
    "fuse_all_reduce_norm",
    "fuse_attention_inputs",
    "fuse_expand_quantize",
    "fuse_attention_expand",
    # specialise
    "skip_padding",
    "select_logit_rows",
    "split_short_long",
    "split_prompts",
    "expand_prompt_attention",
    "compile_pointwise",
    # overlap: last, when all calls are what will run
    "overlap_streams",
    "KERNEL",
)
