"""Implementations of every kernel op, in order of preference.

The order is what was measured (``docs/kernels.md``), not habit.
"""

from collections.abc import Iterator

import torch

from dsa_compile.kernels.entries import cuda_kernel, peer_kernel, torch_function, triton_kernel
from dsa_compile.kernels.facts import (
    Condition,
    dtype_in,
    given,
    size_at_most,
    size_in,
    size_multiple,
    size_power_of_two,
    value_at_most,
    value_in,
    value_multiple,
)
from dsa_compile.kernels.implementation import HOPPER, Implementation

_BF16 = torch.bfloat16
_HALVES = (torch.bfloat16, torch.float16)
_WEIGHTS = (torch.bfloat16, torch.float32)  # of weights and tables in our CUDA C++
_WIDEST = 32768  # a row that one program of Triton's holds
_INDEX_DIMS = (16, 32, 64, 128)  # vectors of the indexer that Triton's products transform


def _latent(name: str, dim: int) -> tuple[Condition, ...]:
    """Widths of the parts of a latent row that Triton's kernels take."""
    return size_power_of_two(name, dim), size_multiple(name, dim, 16)


def _norm_quantize(op: str) -> tuple[Implementation, ...]:
    return (
        cuda_kernel(
            op,
            "norm_quantize",
            dtype_in("x", _BF16),
            dtype_in("weight", *_WEIGHTS),
            size_multiple("x", -1, 256),
        ),
        triton_kernel(op, "norm_quantize", size_at_most("x", -1, _WIDEST)),
    )


def _latent_row(op: str) -> tuple[Implementation, ...]:
    conditions = (
        dtype_in("kv", _BF16),
        size_multiple("weight", 0, 256),
        size_in("cos", -1, 64),
        dtype_in("weight", *_WEIGHTS),
        dtype_in("cos", *_WEIGHTS),
    )
    return (
        cuda_kernel(op, "latent_row", *conditions),
        triton_kernel(op, "latent_cache", *_latent("weight", 0), size_power_of_two("cos", -1)),
    )


_MLA = (
    dtype_in("q_latent", _BF16),
    size_in("q_latent", 2, 512),
    size_in("q_pe", 2, 64),
)
_FLASH_MLA = (*_MLA, size_in("q_latent", 1, 64, 128), size_multiple("slots", 1, 128))
_POWERS = (*_latent("q_latent", 2), *_latent("q_pe", 2))


def _attention() -> tuple[Implementation, ...]:
    """Rows of bf16: ours are ahead of FlashMLA at every shape measured."""
    op = "paged_latent_attention"
    return (
        cuda_kernel(
            op,
            "mla",
            *_MLA,
            dtype_in("cache", _BF16),
            targets=(HOPPER,),
            note="H200, 1,024 tokens × 128 heads: 929 µs, flash_mla 1,021 beside it",
        ),
        peer_kernel(op, "flash_mla", *_FLASH_MLA),
        triton_kernel(op, "mla", *_POWERS),
    )


def _attention_fp8() -> tuple[Implementation, ...]:
    """656-byte rows: FlashMLA is ahead where ours has filled the device once but not yet twice."""
    op, peer = "paged_latent_attention_fp8", (*_FLASH_MLA, size_in("cache", 1, 64))
    return (
        cuda_kernel(
            op,
            "mla",
            *_MLA,
            targets=(HOPPER,),
            max_tokens=66,
            note="H200, 128 heads: 1 token 11.5 µs, 64 tokens 96.8 (flash_mla 18.9, 106.0)",
        ),
        peer_kernel(
            op,
            "flash_mla",
            *peer,
            max_tokens=84,
            note="H200, 72 tokens × 128 heads: 137 µs (cuda 167)",
        ),
        cuda_kernel(
            op,
            "mla",
            *_MLA,
            targets=(HOPPER,),
            note="H200, 128 heads: 256 tokens 379 µs, 8,192 8.8 ms (flash_mla 413, 13.5 ms)",
        ),
        triton_kernel(op, "mla_fp8", *_POWERS),
    )


def _attention_fp8_tensor() -> tuple[Implementation, ...]:
    op = "paged_latent_attention_fp8_tensor"
    return (
        cuda_kernel(op, "mla", *_MLA, targets=(HOPPER,)),
        triton_kernel(op, "mla_fp8", *_POWERS),
    )


def _prompt_attention() -> Iterator[Implementation]:
    """In CUDA C++ for the published widths; Triton's takes any widths of heads. Rows in FP8 are
    brought to bf16 by a kernel with conditions."""
    rows = (*_latent("w_uk", 2), size_power_of_two("q_pe", 2))
    published = (
        dtype_in("q_nope", _BF16),
        size_in("w_uk", 1, 128),
        size_in("w_uv", 1, 128),
        size_in("q_pe", 2, 64),
    )
    for op, needed in (
        ("paged_prompt_attention", ()),
        ("paged_prompt_attention_fp8", rows),
        ("paged_prompt_attention_fp8_tensor", ()),
    ):
        yield cuda_kernel(
            op,
            "prompt_attention",
            *published,
            *needed,
            targets=(HOPPER,),
            note="H200, 128 heads: 2,048 tokens 457 µs, 8,192 5.9 ms (triton 569, 7.8 ms)",
        )
        yield triton_kernel(op, "prompt_attention", *needed)


def _attention_expand() -> Iterator[Implementation]:
    """Attention with expansion, by tokens as attention itself; what follows chooses its kernel."""
    expand = (size_in("w_uv", 1, 128), size_in("w_uv", 2, 512))
    rows, peer = "paged_latent_attention_fp8_expand", (*_FLASH_MLA, size_in("cache", 1, 64))
    yield cuda_kernel(rows, "attention_expand", *_MLA, *expand, targets=(HOPPER,), max_tokens=66)
    yield peer_kernel(rows, "flash_mla", *peer, module="flash_mla_expand", max_tokens=84)
    for op in (rows, "paged_latent_attention_fp8_tensor_expand"):
        yield cuda_kernel(op, "attention_expand", *_MLA, *expand, targets=(HOPPER,))
        yield triton_kernel(op, "mla_fp8_expand", *_POWERS)


_PROJECTION = (size_multiple("weight", 0, 8), size_multiple("weight", 1, 128))

KERNELS: tuple[Implementation, ...] = (
    # norms, activations, quantisation
    triton_kernel("rms_norm", "norm", size_at_most("x", -1, _WIDEST)),
    triton_kernel("add_rms_norm", "norm", size_at_most("x", -1, _WIDEST)),
    triton_kernel("layer_norm", "norm", size_at_most("x", -1, _WIDEST)),
    *_norm_quantize("rms_norm_quantize"),
    *_norm_quantize("rms_norm_quantize_keep"),
    *_norm_quantize("add_rms_norm_quantize"),
    cuda_kernel(
        "all_reduce_add_rms_norm_quantize",
        "all_reduce_norm",
        dtype_in("x", _BF16),
        size_multiple("x", -1, 256),
    ),
    triton_kernel(
        "all_reduce_add_rms_norm_quantize",
        "all_reduce_norm",
        size_at_most("x", -1, _WIDEST),
    ),
    triton_kernel("swiglu", "activation"),
    triton_kernel("swiglu_packed", "activation"),
    cuda_kernel(
        "swiglu_packed_quantize",
        "swiglu_quantize",
        dtype_in("gate_up", _BF16),
        size_multiple("gate_up", -1, 256),
    ),
    triton_kernel("swiglu_packed_quantize", "activation"),
    triton_kernel("quantize_blocks", "quantize"),
    triton_kernel("embedding", "embedding"),
    # RoPE and the caches
    triton_kernel("rope_tables", "rope_tables"),
    triton_kernel("rope_interleaved", "rope", size_power_of_two("x", -1)),
    triton_kernel("rope_half", "rope", size_power_of_two("x", -1)),
    triton_kernel("write_latent_cache", "latent_cache"),
    triton_kernel("write_index_cache", "latent_cache"),
    *_latent_row("norm_rope_write_latent_cache_fp8"),
    *_latent_row("norm_rope_write_latent_cache_fp8_tensor"),
    triton_kernel("dense_slots", "slots"),
    # what is left between them
    torch_function("pointwise", "pointwise", note="Inductor", traced=True),
    # the indexer
    cuda_kernel(
        "write_index_key_fp8",
        "index_quantize",
        dtype_in("k", _BF16),
        size_in("k", 1, 128),
        size_in("cos", -1, 64),
        dtype_in("weight", *_WEIGHTS),
        dtype_in("cos", *_WEIGHTS),
    ),
    triton_kernel(
        "write_index_key_fp8", "index_key", dtype_in("k", *_HALVES), size_in("k", 1, *_INDEX_DIMS)
    ),
    cuda_kernel(
        "index_query_quantize",
        "index_quantize",
        dtype_in("q", _BF16),
        size_in("q", 2, 128),
        size_multiple("q", 1, 16),
        size_in("cos", -1, 64),
        dtype_in("cos", *_WEIGHTS),
    ),
    triton_kernel(
        "index_query_quantize",
        "index_query",
        dtype_in("q", *_HALVES),
        size_in("q", 2, *_INDEX_DIMS),
    ),
    # the parts of attention's first projection
    cuda_kernel(
        "attention_inputs_fp8",
        "attention_inputs",
        dtype_in("merged", _BF16),
        size_multiple("q_weight", 0, 256),
        size_in("k_weight", 0, 128),
        size_multiple("kv_weight", 0, 256),
        size_in("cos", -1, 64),
        *(dtype_in(f"{name}_weight", *_WEIGHTS) for name in ("q", "k", "kv")),
        dtype_in("cos", *_WEIGHTS),
        note="one launch up to 512 tokens",
    ),
    triton_kernel(
        "attention_inputs_fp8",
        "attention_inputs",
        size_at_most("q_weight", 0, _WIDEST),
        size_in("k_weight", 0, *_INDEX_DIMS),
        *_latent("kv_weight", 0),
        size_power_of_two("cos", -1),
        note="a launch for each part",
    ),
    cuda_kernel(
        "index_head_weights",
        "head_weights",
        dtype_in("x", _BF16),
        size_multiple("x", 1, 1024),
        size_at_most("x", 1, 8192),
        max_tokens=32,
        note="H200, 1 token: 4.1 µs (triton 7.3; conversion, cuBLAS and scale apart 8.6)",
    ),
    triton_kernel("index_head_weights", "head_weights"),
    triton_kernel(
        "paged_index_topk",
        "index_topk",
        value_multiple("topk", 4),
        value_at_most("topk", 2048),
        size_multiple("q", 2, 4),
        mixed=True,  # top-k
    ),
    cuda_kernel(
        "paged_index_topk_fp8",
        "index_topk",
        size_in("q", 1, 16, 32, 64),
        size_in("q", 2, 128),
        size_in("cache", 1, 16, 32, 64),
        value_multiple("topk", 4),
        value_at_most("topk", 2048),
        targets=(HOPPER,),
        note="H200, 2,048 × 65,536, scores and top-k: 1,812 µs (deep_gemm + vllm 2,479)",
    ),
    triton_kernel(
        "paged_index_topk_fp8",
        "index_topk",
        value_multiple("topk", 4),
        value_at_most("topk", 2048),
        size_multiple("q", 2, 4),
        mixed=True,  # top-k
    ),
    # attention to the latent cache
    *_attention(),
    *_attention_fp8(),
    *_attention_fp8_tensor(),
    *_attention_expand(),
    *_prompt_attention(),
    torch_function("absorb_query", "absorb"),
    torch_function("expand_output", "absorb"),
    cuda_kernel(
        "absorb_rope_query",
        "head_products",
        dtype_in("q", _BF16),
        size_in("q", 2, 192, 256),
        size_in("w_uk", 1, 128, 192),
        size_in("w_uk", 2, 512),
        max_tokens=32,
        note="H200, 1 token: 5.2 µs (product and rotation apart 8.2); 32 tokens: 9.5 (10.1)",
    ),
    torch_function("absorb_rope_query", "absorb"),
    cuda_kernel(
        "expand_output_quantize",
        "head_products",
        dtype_in("o_latent", _BF16),
        size_in("w_uv", 1, 128, 256),
        size_in("w_uv", 2, 512),
        max_tokens=32,
        note="H200, 1 token: 5.7 µs (product and quantisation apart 8.2); 64 tokens: 13.0 (9.1)",
    ),
    torch_function("expand_output_quantize", "absorb"),
    # projections
    cuda_kernel(
        "linear_fp8",
        "gemm_fp8",
        *_PROJECTION,
        targets=(HOPPER,),
        max_tokens=64,
        note="H200, a layer's six at 1 token: 61 µs (deep_gemm 93)",
    ),
    peer_kernel(
        "linear_fp8",
        "deep_gemm",
        *_PROJECTION,
        note="H200, a layer's six at 4,096 tokens: 1,331 µs (cuda 1,448)",
    ),
    cuda_kernel("linear_fp8", "gemm_fp8", *_PROJECTION, targets=(HOPPER,)),
    triton_kernel("linear_fp8", "gemm_fp8"),
    # experts and their router
    cuda_kernel(
        "router",
        "router",
        dtype_in("x", _BF16),
        dtype_in("weight", _BF16),
        size_multiple("x", 1, 1024),
        size_at_most("x", 1, 8192),
        size_multiple("weight", 0, 32),
        size_at_most("weight", 0, 512),
        value_in("n_group", 1, 2, 4, 8, 16, 32),
        value_at_most("top_k", 16),
        value_at_most("shared_experts", 16),
        given("bias"),
        value_in("zero_dropped", False),
        value_in("softmax", False),
        max_tokens=2,
        note="H200, 1 token: 5.6 µs (triton 7.8); 16 tokens: 13.7 (8.4)",
    ),
    triton_kernel(
        *("router", "router", size_at_most("weight", 0, 1024)),
        given("bias"),
        value_in("zero_dropped", False),
        value_in("softmax", False),
    ),
    triton_kernel("experts", "experts"),
    cuda_kernel(
        "experts_fp8",
        "experts_fp8",
        size_multiple("x", 1, 256),
        size_multiple("down", 2, 128),
        size_at_most("down", 0, 1024),
        targets=(HOPPER,),
        note="H200, 8,192 tokens: 7.3 ms (deep_gemm's products and what is around them 9.1)",
    ),
    peer_kernel(
        "experts_fp8",
        "deep_gemm",
        size_multiple("x", 1, 128),
        size_multiple("down", 2, 128),
        module="deep_gemm_experts",
    ),
    triton_kernel("experts_fp8", "experts"),
)
