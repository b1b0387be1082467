"""Calls that ops must refuse, written from their docstrings: one operand of a sample call changed.

Each list begins with the tensor operands of :mod:`tests.ops.sample_calls`' first call of the op.
"""

import torch

DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip


def tensor(text: str) -> torch.Tensor:
    """``"f32 3 5"`` as a tensor without memory."""
    dtype, *shape = text.split()
    return torch.empty([int(size) for size in shape], dtype=DTYPES[dtype], device="meta")


# op: operand -> what it is not
WRONG: dict[str, list[tuple[str, str]]] = {
    # x f32 3 5 8, weight f32 8
    "rms_norm": [
        ("weight", "f32 5"), ("weight", "f32 1"), ("weight", "f32 1 8"), ("weight", "f32"),
        ("weight", "i64 8"), ("x", "e4m3 3 5 8"), ("x", "i32 3 5 8"), ("x", "f32 3 5 64"),
    ],
    "layer_norm": [
        ("weight", "f32 7"), ("bias", "f32 7"), ("bias", "f32 1"), ("bias", "f32 3 8"),
        ("weight", "u8 8"),
    ],
    # x f32 3 5 2 8, tables f32 3 5 8
    "rope_interleaved": [
        ("cos", "f32 3 5 4"), ("sin", "f32 3 5 4"), ("sin", "f32 8"), ("cos", "f32 3 5 2 8"),
        ("sin", "bf16 3 5 8"), ("x", "f32 3 5 8"), ("x", "f32 3 5 2 7"), ("cos", "f32 1 5 8"),
    ],
    # x f32 6 2 8, tables f32 6 8
    "rope_half": [
        ("cos", "f32 6 16"), ("sin", "f32 5 8"), ("cos", "bf16 6 8"), ("x", "f32 6 8"),
        ("x", "bf16 6 2 8"),
    ],
    "rope_tables": [
        ("inv_freq", "bf16 4"), ("inv_freq", "f32 1 4"), ("positions", "f32 3 5"),
    ],
    # x f32 6 2 8, positions i64 6, scale and bias f32 2
    "scale_by_position": [
        ("x", "f32 6 3 8"), ("x", "e4m3 6 2 8"), ("positions", "i64 5"), ("positions", "f32 6"),
        ("scale", "f32 3"), ("bias", "f32 3"), ("bias", "f32 2 1"),
    ],
    # x f32 3 5 8, weight f32 7 8
    "linear": [
        ("weight", "f32 8 7"), ("weight", "f32 8"), ("weight", "bf16 7 8"), ("x", "bf16 3 5 8"),
        ("weight", "f32 7 63"),
    ],
    "embedding": [("ids", "f32 3 5"), ("weight", "f32 9"), ("weight", "i64 9 8")],
    "swiglu": [("up", "f32 3 5 4"), ("up", "f32 5 8"), ("up", "bf16 3 5 8"), ("gate", "f32 15 8")],
    "swiglu_packed": [("gate_up", "f32 6 63"), ("gate_up", "e4m3 6 8"), ("gate_up", "f32")],
    "all_reduce": [("x", "e4m3 3 5 8"), ("x", "i64 3 5 8"), ("x", "f32")],
    "all_gather": [("x", "e4m3 3 5 8"), ("x", "i64 3 5 8"), ("x", "f32")],
    "reduce_scatter": [("x", "i64 6 8"), ("x", "e4m3 6 8"), ("x", "f32 2 3 8")],
    # indices i64 6 2, places i64 5
    "place_experts": [("indices", "i32 6 2"), ("indices", "i64 12"), ("places", "i32 5")],
    # x f32 6 8, weight f32 12 8, bias f32 12, three groups
    "router": [
        ("x", "f32 2 3 8"), ("x", "f32 6 7"), ("weight", "f32 11 8"), ("bias", "f32 11"),
        ("bias", "bf16 12"), ("bias", "f32 12 1"), ("weight", "f32 12 7"),
    ],
    # x bf16 6 8, weights f32 6 2, indices i64 6 2, gate_up bf16 5 16 8, down bf16 5 8 8
    "experts": [
        ("x", "bf16 6 7"), ("weights", "bf16 6 2"), ("weights", "f32 6 3"), ("indices", "i32 6 2"),
        ("indices", "i64 5 2"), ("gate_up", "bf16 5 8 8"), ("gate_up", "bf16 5 8 16"),
        ("gate_up", "f32 5 16 8"), ("down", "bf16 4 8 8"), ("down", "bf16 5 8 4"),
        ("down", "bf16 8 8"),
    ],
    # q f32 2 9 3 4, k f32 2 9 4, weights f32 2 9 3
    "index_topk": [
        ("q", "f32 2 9 3 5"), ("k", "f32 2 9 3 4"), ("k", "f32 2 8 4"), ("k", "bf16 2 9 4"),
        ("weights", "bf16 2 9 3"), ("weights", "f32 2 9 4"), ("weights", "f32 9 3"),
    ],
    # q, k f32 2 9 3 4, v f32 2 9 3 6, indices i32 2 9 5
    "sparse_attention": [
        ("k", "f32 2 9 3 6"), ("k", "f32 2 9 2 4"), ("v", "f32 2 8 3 6"), ("v", "bf16 2 9 3 6"),
        ("indices", "i64 2 9 5"), ("indices", "i32 9 5"), ("indices", "i32 2 8 5"),
    ],
    # q_nope f32 2 9 3 4, w_uk f32 3 4 7
    "absorb_query": [
        ("w_uk", "f32 3 7 4"), ("w_uk", "f32 2 4 7"), ("w_uk", "f32 4 7"), ("w_uk", "bf16 3 4 7"),
        ("q_nope", "f32 3 4"),
    ],
    # o_latent f32 2 9 3 7, w_uv f32 3 4 7
    "expand_output": [
        ("w_uv", "f32 3 7 4"), ("w_uv", "f32 2 4 7"), ("w_uv", "f16 3 4 7"),
        ("o_latent", "f32 3 7"),
    ],
    # q_latent f32 9 3 7, q_pe f32 9 3 4, ckv f32 9 7, k_pe f32 9 4, indices i32 9 5
    "latent_attention": [
        ("q_pe", "f32 9 3 7"), ("q_pe", "f32 9 2 4"), ("ckv", "f32 9 4"), ("k_pe", "f32 9 7"),
        ("ckv", "bf16 9 7"), ("indices", "i64 9 5"), ("k_pe", "f32 8 4"),
    ],
    # x, residual f32 6 8, weight f32 8
    "add_rms_norm": [
        ("residual", "f32 5 8"), ("residual", "f32 8"), ("weight", "f32 6"), ("weight", "f32 6 8"),
        ("residual", "i64 6 8"),
    ],
    # ckv f32 6 5, k_pe f32 6 3, cache f32 4 4 8, slot_mapping i64 6
    "write_latent_cache": [
        ("k_pe", "f32 6 5"), ("k_pe", "f32 5 3"), ("cache", "f16 4 4 8"), ("cache", "bf16 4 4 8"),
        ("cache", "f32 16 8"), ("cache", "f32 4 4 5"), ("slot_mapping", "i32 6"),
        ("slot_mapping", "i64 5"), ("slot_mapping", "i64 6 1"),
    ],
    "write_index_cache": [
        ("cache", "f16 4 4 5"), ("cache", "f32 4 4 4"), ("cache", "f32 4 5"),
        ("slot_mapping", "i64 5"), ("slot_mapping", "i32 6"), ("k", "f32 6 1 5"),
    ],
    # q f32 8 3 4, weights f32 8 3, cache f32 5 4 4, tables i32 2 3, cu i32 3, lens i32 2
    "paged_index_topk": [
        ("q", "f32 8 3 5"), ("weights", "f32 8 4"), ("weights", "bf16 8 3"), ("cache", "f16 5 4 4"),
        ("cache", "f32 5 4 3"), ("block_tables", "i64 2 3"), ("block_tables", "i32 6"),
        ("cu_seqlens", "i32 2"), ("cu_seqlens", "i64 3"), ("context_lens", "i32 3"),
    ],
    "paged_index_topk_fp8": [
        ("q", "bf16 8 3 8"), ("weights", "f32 7 3"), ("cache", "u8 5 4 8"),
        ("cache", "e4m3 5 4 12"),
        ("block_tables", "i64 2 3"), ("cu_seqlens", "i32 2"), ("context_lens", "i64 2"),
    ],
    "dense_slots": [
        ("block_tables", "i64 2 3"), ("cu_seqlens", "i32 4"), ("context_lens", "i32 1"),
        ("positions", "i64 8 1"), ("positions", "f32 8"),
    ],
    # q_latent f32 6 3 5, q_pe f32 6 3 2, cache f32 4 4 7, slots i32 6 3
    "paged_latent_attention": [
        ("q_latent", "bf16 6 3 5"), ("q_pe", "f32 6 3 3"), ("q_pe", "f32 6 2 2"),
        ("cache", "f16 4 4 7"), ("cache", "f32 4 4 5"), ("cache", "f32 16 7"), ("slots", "i64 6 3"),
        ("slots", "i32 5 3"), ("slots", "i32 6"),
    ],
    # q_latent f32 6 3 128, q_pe f32 6 3 2, cache u8 1 16 136, slots i32 6 3
    "paged_latent_attention_fp8": [
        ("cache", "e4m3 1 16 136"), ("cache", "u8 1 16 130"), ("cache", "u8 16 136"),
        ("slots", "i32 7 3"), ("q_pe", "bf16 6 3 2"), ("q_latent", "f32 6 3 64"),
    ],
    "paged_latent_attention_fp8_tensor": [
        ("cache", "f32 4 4 7"), ("cache", "u8 4 4 8"), ("cache_scale", "f32"),
        ("cache_scale", "f32 2"), ("cache_scale", "bf16 1"), ("slots", "i64 6 3"),
    ],
    "paged_latent_attention_fp8_expand": [
        ("w_uv", "f32 3 64 128"), ("w_uv", "f32 2 128 128"), ("w_uv", "bf16 3 128 128"),
        ("w_uv", "f32 3 128 64"), ("cache", "u8 1 16 130"),
    ],
    "paged_latent_attention_fp8_tensor_expand": [
        ("w_uv", "f32 3 100 5"), ("w_uv", "f32 3 256 4"), ("cache_scale", "f32 3"),
        ("cache", "u8 4 4 6"),
    ],
    # q_nope f32 6 3 4, q_pe f32 6 3 2, cache f32 4 4 7, slots and positions i64 6,
    # w_uk f32 3 4 5, w_uv f32 3 6 5
    "paged_prompt_attention": [
        ("q_nope", "f32 6 3 5"), ("q_nope", "f32 6 4"), ("q_pe", "f32 6 2 2"),
        ("q_pe", "f32 6 3 3"), ("q_pe", "bf16 6 3 2"), ("cache", "f32 4 4 8"),
        ("cache", "bf16 4 4 7"), ("cache", "f32 16 7"), ("slot_mapping", "i32 6"),
        ("slot_mapping", "i64 5"), ("positions", "i32 6"), ("positions", "i64 7"),
        ("w_uk", "f32 3 5 4"), ("w_uk", "f32 2 4 5"), ("w_uv", "f32 3 6 4"), ("w_uv", "f32 4 6 5"),
        ("w_uv", "bf16 3 6 5"), ("selected_slots", "i64 6 3"), ("selected_slots", "i32 5 3"),
        ("selected_slots", "i32 6"),
    ],
    "paged_prompt_attention_fp8": [
        ("cache", "e4m3 1 16 136"), ("cache", "u8 1 16 130"), ("cache", "u8 16 136"),
        ("slot_mapping", "i64 7"), ("positions", "f32 6"), ("q_pe", "f32 6 3 4"),
        ("w_uk", "f32 3 4 64"), ("w_uv", "f32 3 6 64"),
    ],
    "paged_prompt_attention_fp8_tensor": [
        ("cache", "f32 4 4 7"), ("cache", "u8 4 4 8"), ("cache_scale", "f32"),
        ("cache_scale", "f32 3"), ("w_uk", "f32 3 4 6"), ("positions", "i64 6 1"),
        ("selected_slots", "i64 6 3"),
    ],
    "quantize_blocks": [("x", "e4m3 3 5 256"), ("x", "i32 3 5 256"), ("x", "f32")],
    "rms_norm_quantize": [("weight", "f32 64"), ("weight", "f32 5 128"), ("x", "u8 5 128")],
    "rms_norm_quantize_keep": [("weight", "f32 64"), ("weight", "i64 128"), ("x", "f32 3 5 96")],
    "add_rms_norm_quantize": [
        ("residual", "bf16 6 128"), ("residual", "f32 5 128"), ("weight", "f32 64"),
    ],
    "all_reduce_add_rms_norm_quantize": [
        ("residual", "bf16 6 128"), ("residual", "f32 5 128"), ("weight", "f32 64"),
    ],
    "swiglu_packed_quantize": [("gate_up", "bf16 6 255"), ("gate_up", "e4m3 6 256")],
    # kv bf16 6 132, weight f32 128, tables f32 6 4, cache u8 4 4 140, slot_mapping i64 6
    "norm_rope_write_latent_cache_fp8": [
        ("kv", "f32 6 132"), ("kv", "bf16 6 128"), ("weight", "f32 64"), ("cos", "f32 6 8"),
        ("sin", "f32 5 4"), ("cache", "u8 4 4 136"), ("cache", "f16 4 4 140"),
        ("slot_mapping", "i64 5"),
    ],
    # kv f32 6 12, weight f32 8, tables f32 6 4, scale f32 1, cache u8 4 4 12
    "norm_rope_write_latent_cache_fp8_tensor": [
        ("kv", "f32 6 13"), ("scale", "f32 2"), ("scale", "f32"), ("scale", "bf16 1"),
        ("cache", "f32 4 4 12"), ("cache", "u8 4 4 16"), ("slot_mapping", "i32 6"),
    ],
    # k f32 6 8, weight, bias f32 8, tables f32 6 4, cache u8 4 4 12, slot_mapping i64 6
    "write_index_key_fp8": [
        ("k", "f32 6 12"), ("weight", "f32 4"), ("bias", "f32 4"), ("cos", "f32 6 16"),
        ("sin", "bf16 6 4"), ("cache", "u8 4 4 8"), ("cache", "e4m3 4 4 12"),
        ("slot_mapping", "i64 7"),
    ],
    # merged bf16 6 268, q_weight f32 128, k_weight 8, kv_weight 128, tables f32 6 4, caches u8
    "attention_inputs_fp8": [
        ("merged", "bf16 6 264"), ("q_weight", "f32 64"), ("k_weight", "f32 16"),
        ("k_bias", "f32 4"),
        ("kv_weight", "f32 64"), ("cos", "f32 6 2"), ("sin", "f32 5 4"),
        ("latent_cache", "u8 4 4 132"), ("index_cache", "u8 4 4 8"), ("index_cache", "u8 5 4 12"),
        ("slot_mapping", "i32 6"),
    ],
    # q bf16 6 3 8, weights f32 6 3, tables f32 6 4
    "index_query_quantize": [
        ("q", "bf16 6 3 12"), ("weights", "bf16 6 3"), ("weights", "f32 6 2"), ("cos", "f32 6 16"),
        ("sin", "f32 6 2"),
    ],
    # q f32 6 2 12, w_uk f32 2 8 5, tables f32 6 4
    "absorb_rope_query": [
        ("q", "f32 6 2 8"), ("w_uk", "f32 2 4 5"), ("w_uk", "f32 3 8 5"), ("w_uk", "bf16 2 8 5"),
        ("cos", "bf16 6 4"), ("sin", "f32 6 2"),
    ],
    "expand_output_quantize": [
        ("w_uv", "f32 2 64 5"), ("w_uv", "f32 3 128 5"), ("w_uv", "f32 2 128 4"),
        ("o_latent", "bf16 6 2 5"),
    ],
    "index_head_weights": [("weight", "bf16 3 8"), ("weight", "f32 3 7"), ("x", "bf16 6 1 8")],
    # x e4m3 6 128, x_scale f32 6 1, weights f32 6 2, indices i64 6 2, gate_up e4m3 5 256 128, …
    "experts_fp8": [
        ("x", "bf16 6 128"), ("x_scale", "f32 6 2"), ("x_scale", "bf16 6 1"),
        ("weights", "f32 6 3"), ("indices", "f32 6 2"), ("gate_up", "e4m3 5 128 128"),
        ("gate_up_scale", "f32 5 1 1"), ("gate_up_scale", "f32 5 2 2"), ("down", "e4m3 5 128 64"),
        ("down_scale", "f32 5 1"), ("down_scale", "f32 4 1 1"), ("down_scale", "u8 5 1 1"),
    ],
    # x e4m3 6 256, x_scale f32 6 2, weight e4m3 136 256, weight_scale f32 2 2
    "linear_fp8": [
        ("x", "bf16 6 256"), ("x_scale", "f32 6 1"), ("x_scale", "f32 5 2"),
        ("weight", "e4m3 136 128"), ("weight", "bf16 136 256"), ("weight_scale", "f32 1 2"),
        ("weight_scale", "f32 2 1"), ("weight_scale", "bf16 2 2"), ("x", "e4m3 2 3 256"),
    ],
}  # fmt: skip
