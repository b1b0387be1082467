"""Calls that every op takes, on small tensors of every layout."""

from dataclasses import dataclass

import torch


def randn(*shape):
    return torch.randn(shape)


def ints(high, *shape, dtype=torch.int32):
    return torch.randint(0, high, shape, dtype=dtype)


def permuted(*shape):
    """Dense, with the strides of another order of dimensions: results must not inherit them."""
    return torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])


def fp8_rows(rows, rank, rope_dim):
    """A page of rows of e4m3, a scale per 128, and bf16."""
    values = torch.randn(rows, rank).to(torch.float8_e4m3fn)
    parts = (values, torch.rand(rows, rank // 128), torch.randn(rows, rope_dim).bfloat16())
    return torch.cat([part.view(torch.uint8) for part in parts], 1)[None]


PAGED = (
    torch.tensor([[3, 1, -1], [0, 2, 4]], dtype=torch.int32),
    torch.tensor([0, 1, 6], dtype=torch.int32),
    torch.tensor([7, 9], dtype=torch.int32),
)

# two prompts, the rows of the first behind those of the second, and a token of padding
SLOTS, POSITIONS = torch.tensor([9, 10, 2, 3, 4, -1]), torch.tensor([0, 1, 0, 1, 2, 0])


@dataclass(frozen=True)
class Case:
    name: str
    args: tuple


CASES = [
    Case("rms_norm", (randn(3, 5, 8), randn(8), 1e-6)),
    Case("rms_norm", (randn(3, 8).bfloat16(), randn(8), 1e-6)),
    Case("rms_norm", (permuted(3, 5, 8), randn(8), 1e-6)),
    Case("layer_norm", (randn(3, 5, 8), randn(8), randn(8), 1e-6)),
    Case("layer_norm", (permuted(3, 5, 8), randn(8), randn(8), 1e-6)),
    Case("rope_interleaved", (randn(3, 5, 2, 8), randn(3, 5, 8), randn(3, 5, 8))),
    Case("rope_interleaved", (permuted(3, 5, 2, 8), randn(3, 5, 8), randn(3, 5, 8))),
    Case("rope_half", (randn(6, 2, 8), randn(6, 8), randn(6, 8))),
    Case("rope_half", (permuted(6, 2, 8), randn(6, 8), randn(6, 8))),
    Case("rope_tables", (ints(99, 3, 5, dtype=torch.int64), randn(4), 1.5, torch.bfloat16)),
    Case("scale_by_position", (permuted(6, 2, 8), ints(99, 6, dtype=torch.int64), *randn(2, 2))),
    Case("linear", (permuted(3, 5, 8), randn(7, 8))),
    Case("embedding", (ints(9, 3, 5, dtype=torch.int64), randn(9, 8))),
    Case("swiglu", (randn(3, 5, 8), randn(3, 5, 8))),
    Case("swiglu", (permuted(3, 5, 8), permuted(3, 5, 8))),
    Case("swiglu_packed", (randn(6, 8),)),
    Case("all_reduce", (permuted(3, 5, 8), "tp", 1)),
    Case("all_gather", (permuted(3, 5, 8), "tp", 1)),
    Case("reduce_scatter", (permuted(6, 8), "dp", 1)),
    Case("place_experts", (ints(5, 6, 2, dtype=torch.int64), torch.tensor([1, -1, 0, -1, 2]))),
    Case("router", (randn(6, 8), randn(12, 8), randn(12), 3, 2, 4, True, 2.5)),
    Case("router", (randn(6, 8), randn(12, 8), randn(12), 3, 2, 4, True, 2.5, 1)),
    Case("absorb_rope_query", (randn(6, 2, 12), randn(2, 8, 5), randn(6, 4), randn(6, 4))),
    Case("absorb_rope_query", (permuted(6, 2, 12), randn(2, 8, 5), randn(6, 4), randn(6, 4))),
    Case("expand_output_quantize", (randn(6, 2, 5), randn(2, 128, 5), True)),
    Case("expand_output_quantize", (permuted(6, 2, 5), randn(2, 256, 5), False)),
    Case("index_head_weights", (randn(6, 8).bfloat16(), randn(3, 8), 0.5)),
    Case("index_head_weights", (permuted(6, 8), randn(3, 8), 0.5)),
    Case("router", (permuted(6, 8), randn(12, 8), randn(12), 1, 1, 4, False, 2.5)),
    Case(
        "experts",
        (
            permuted(6, 8).bfloat16(),
            torch.rand(6, 2),
            ints(5, 6, 2, dtype=torch.int64),
            randn(5, 16, 8).bfloat16(),
            randn(5, 8, 8).bfloat16(),
        ),
    ),
    Case("index_topk", (permuted(2, 9, 3, 4), permuted(2, 9, 4), permuted(2, 9, 3), 5, 0.5)),
    Case(
        "sparse_attention",
        (permuted(2, 9, 3, 4), permuted(2, 9, 3, 4), randn(2, 9, 3, 6), ints(9, 2, 9, 5), 0.5),
    ),
    Case("index_topk", (randn(9, 3, 4), randn(9, 4), randn(9, 3), 5, 0.5)),
    Case("sparse_attention", (randn(9, 3, 4), randn(9, 3, 4), randn(9, 3, 6), ints(9, 9, 5), 0.5)),
    Case(
        "latent_attention",
        (randn(9, 3, 7), randn(9, 3, 4), randn(9, 7), randn(9, 4), ints(9, 9, 5), 0.5),
    ),
    Case("absorb_query", (permuted(2, 9, 3, 4), randn(3, 4, 7))),
    Case("absorb_query", (randn(6, 3, 4), randn(3, 4, 7))),
    Case("expand_output", (permuted(2, 9, 3, 7), randn(3, 4, 7))),
    Case(
        "latent_attention",
        (permuted(2, 9, 3, 7), randn(2, 9, 3, 4), randn(2, 9, 7), randn(2, 9, 4), ints(9, 2, 9, 5),
         0.5),
    ),
    Case("add_rms_norm", (randn(6, 8), permuted(6, 8), randn(8), 1e-6)),
    Case("write_latent_cache", (randn(6, 5), randn(6, 3), randn(4, 4, 8), torch.arange(6))),
    Case("write_index_cache", (randn(6, 5), randn(4, 4, 5), torch.arange(6))),
    Case("paged_index_topk", (permuted(8, 3, 4), permuted(8, 3), randn(5, 4, 4), *PAGED, 6, 0.5)),
    Case(
        "paged_index_topk_fp8",
        (permuted(8, 3, 8).to(torch.float8_e4m3fn), permuted(8, 3),
         torch.ones(5, 4, 12, dtype=torch.uint8), *PAGED, 6),
    ),
    Case("dense_slots", (*PAGED, ints(9, 8, dtype=torch.int64), 4, 12)),
    Case("paged_latent_attention",
         (permuted(6, 3, 5), randn(6, 3, 2), randn(4, 4, 7), ints(16, 6, 3), 0.5)),
    Case("paged_latent_attention_fp8",
         (permuted(6, 3, 128), randn(6, 3, 2), fp8_rows(16, 128, 2), ints(16, 6, 3), 0.5)),
    Case("paged_latent_attention_fp8_tensor",
         (permuted(6, 3, 5), randn(6, 3, 2), randn(4, 4, 7).to(torch.float8_e4m3fn),
          ints(16, 6, 3), 0.5, torch.tensor([0.5]))),
    Case("paged_latent_attention_fp8_expand",
         (permuted(6, 3, 128), randn(6, 3, 2), fp8_rows(16, 128, 2), ints(16, 6, 3), 0.5,
          randn(3, 128, 128), True)),
    Case("paged_latent_attention_fp8_tensor_expand",
         (permuted(6, 3, 5), randn(6, 3, 2), randn(4, 4, 7).to(torch.float8_e4m3fn),
          ints(16, 6, 3), 0.5, torch.tensor([0.5]), randn(3, 256, 5), False)),
    Case("paged_prompt_attention",
         (permuted(6, 3, 4), randn(6, 3, 2), randn(4, 4, 7), SLOTS, POSITIONS, randn(3, 4, 5),
          randn(3, 6, 5), 0.5, ints(16, 6, 3))),
    Case("paged_prompt_attention",
         (permuted(6, 3, 4), randn(6, 3, 2), randn(4, 4, 7), SLOTS, POSITIONS, randn(3, 4, 5),
          randn(3, 6, 5), 0.5)),
    Case("paged_prompt_attention_fp8",
         (randn(6, 3, 4), permuted(6, 3, 2), fp8_rows(16, 128, 2), SLOTS, POSITIONS,
          randn(3, 4, 128), randn(3, 6, 128), 0.5, ints(16, 6, 3))),
    Case("paged_prompt_attention_fp8_tensor",
         (permuted(6, 3, 4), randn(6, 3, 2), randn(4, 4, 7).to(torch.float8_e4m3fn), SLOTS,
          POSITIONS, randn(3, 4, 5), randn(3, 6, 5), 0.5, torch.tensor([0.5]), ints(16, 6, 3))),
    Case("quantize_blocks", (randn(3, 5, 256), True)),
    Case("quantize_blocks", (permuted(5, 128).bfloat16(), False)),
    Case("rms_norm_quantize", (permuted(5, 128), randn(128), 1e-6, False)),
    Case("rms_norm_quantize_keep", (permuted(3, 5, 128).bfloat16(), randn(128), 1e-6, True)),
    Case(
        "all_reduce_add_rms_norm_quantize",
        (permuted(6, 128), "tp", 1, randn(6, 128), randn(128), 1e-6, True),
    ),
    Case("add_rms_norm_quantize", (randn(6, 128), permuted(6, 128), randn(128), 1e-6, False)),
    Case("swiglu_packed_quantize", (permuted(6, 256).bfloat16(), True)),
    Case(
        "norm_rope_write_latent_cache_fp8",
        (randn(6, 132).bfloat16(), randn(128), 1e-6, randn(6, 4), randn(6, 4), False, True,
         ints(256, 4, 4, 140, dtype=torch.uint8), torch.arange(6)),
    ),
    Case(
        "norm_rope_write_latent_cache_fp8_tensor",
        (randn(6, 12), randn(8), 1e-6, randn(6, 4), randn(6, 4), True, torch.tensor([0.1]),
         ints(256, 4, 4, 12, dtype=torch.uint8), torch.arange(6)),
    ),
    Case(
        "write_index_key_fp8",
        (permuted(6, 8), randn(8), randn(8), 1e-6, randn(6, 4), randn(6, 4), False,
         ints(256, 4, 4, 12, dtype=torch.uint8), torch.arange(6)),
    ),
    Case(
        "attention_inputs_fp8",
        (randn(6, 128 + 8 + 132).bfloat16(), randn(128), 1e-6, randn(8), randn(8), 1e-6,
         randn(128), 1e-6, randn(6, 4), randn(6, 4), True, False, True,
         ints(256, 4, 4, 140, dtype=torch.uint8),
         ints(256, 4, 4, 12, dtype=torch.uint8), torch.arange(6)),
    ),
    Case(
        "index_query_quantize",
        (permuted(6, 3, 8).bfloat16(), randn(6, 3), randn(6, 4), randn(6, 4), True, 0.1),
    ),
    Case(
        "experts_fp8",
        (
            permuted(6, 128).to(torch.float8_e4m3fn), torch.rand(6, 1), torch.rand(6, 2),
            ints(5, 6, 2, dtype=torch.int64), randn(5, 256, 128).to(torch.float8_e4m3fn),
            torch.rand(5, 2, 1), randn(5, 128, 128).to(torch.float8_e4m3fn), torch.rand(5, 1, 1),
        ),
    ),
    Case(
        "linear_fp8",
        (permuted(6, 256).to(torch.float8_e4m3fn), torch.rand(6, 2),
         permuted(136, 256).to(torch.float8_e4m3fn), torch.rand(2, 2)),
    ),
]  # fmt: skip
