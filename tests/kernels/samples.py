"""Small and awkward inputs of every op that has a kernel of ours.

Rows that no tile divides, slots of -1, empty requests and, where a kernel is chosen by the number
of tokens, some on either side. Inputs lie on torch's default device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
E4M3 = torch.float8_e4m3fn
EPS = 1e-6


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape).to(dtype)


def noise(*shape: int) -> Tensor:
    """Any bytes: what a cache holds before it is written."""
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def tables(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.rand(tokens, 32).repeat(1, 2) * 6.0
    return angles.cos().to(dtype), angles.sin().to(dtype)


def slots_of(tokens: int, rows: int) -> Tensor:
    """int64 ``[tokens]``, some -1."""
    slots = torch.randperm(rows)[:tokens]
    slots[tokens // 2] = -1
    return slots


def batch(lengths: tuple[tuple[int, int], ...], block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Block tables with pages in random order, cumulated query lengths, contexts.

    Args:
        lengths: queries and context of each request.
        block_size: keys of a page.
    """
    width = max(-(-context // block_size) for _, context in lengths) + 1
    block_tables = torch.randperm(len(lengths) * width).view(len(lengths), width).int()
    for row, (_, context) in zip(block_tables, lengths, strict=True):
        row[-(-context // block_size) :] = -1
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0).int()
    return block_tables, starts, torch.tensor([n for _, n in lengths], dtype=torch.int32)


def _norm() -> Iterator[Arguments]:
    yield randn(5, 768), randn(768), EPS
    yield randn(3, 2240)[:, :1536], randn(1536), EPS


def _add_norm() -> Iterator[Arguments]:
    yield randn(5, 768), randn(5, 768), randn(768), EPS


def _layer_norm() -> Iterator[Arguments]:
    yield randn(7, 128), randn(128), randn(128), EPS


def _quantizing(samples: Callable[[], Iterator[Arguments]]) -> Callable[[], Iterator[Arguments]]:
    def quantizing() -> Iterator[Arguments]:
        for arguments in samples():
            yield *arguments, False
            yield *arguments, True

    return quantizing


def _swiglu() -> Iterator[Arguments]:
    merged = randn(5, 600)
    yield merged[:, 3:300], merged[:, 301:598]


def _gate_up() -> Iterator[Arguments]:
    yield (randn(5, 768),)


def _blocks() -> Iterator[Arguments]:
    yield (randn(5, 640),)


def _embedding() -> Iterator[Arguments]:
    yield torch.tensor([6, 0, 3]), randn(7, 300)


def _rope_tables() -> Iterator[Arguments]:
    inv_freq = 10_000 ** -(torch.arange(32) / 32)
    for dtype in (torch.bfloat16, torch.float32):
        yield torch.tensor([0, 1, 163_839, 77, 5]), inv_freq, 1.3, dtype


def _rope() -> Iterator[Arguments]:
    yield randn(5, 3, 96)[..., 32:], *tables(5, torch.bfloat16)


def _latent_rows() -> Iterator[tuple[Tensor, Tensor]]:
    """Latent rows as the merged projection leaves them, and slots for them."""
    for tokens in (1, 19):
        yield randn(tokens, 2240)[:, 1664:], slots_of(tokens, 48)


def _write_latent() -> Iterator[Arguments]:
    yield randn(5, 512), randn(5, 64), randn(3, 16, 576), slots_of(5, 48)


def _write_index() -> Iterator[Arguments]:
    yield randn(5, 128), randn(3, 16, 128), slots_of(5, 48)


def _norm_rope_write_fp8() -> Iterator[Arguments]:
    for kv, slots in _latent_rows():
        yield kv, randn(512), EPS, *tables(len(kv)), True, True, noise(3, 16, 656), slots


def _norm_rope_write_tensor() -> Iterator[Arguments]:
    scale = torch.tensor([0.02])
    for kv, slots in _latent_rows():
        yield kv, randn(512), EPS, *tables(len(kv)), True, scale, noise(3, 16, 576), slots


def _dense_slots() -> Iterator[Arguments]:
    block_tables, starts, contexts = batch(((1, 7), (5, 9), (2, 0)), 4)
    yield block_tables, starts, contexts, torch.zeros(10, dtype=torch.int64), 4, 12


def _write_index_fp8() -> Iterator[Arguments]:
    for tokens in (1, 19):
        key = randn(tokens, 2240)[:, 1536:1664], randn(128), randn(128), EPS
        yield *key, *tables(tokens), False, noise(3, 16, 132), slots_of(tokens, 48)


def _index_query() -> Iterator[Arguments]:
    for tokens in (1, 5):
        weights = torch.randn(tokens, 64)
        yield randn(tokens, 64, 128), weights, *tables(tokens), False, 0.01


def _attention_inputs() -> Iterator[Arguments]:
    for tokens, cache, *scale in (
        (19, noise(3, 64, 656)),
        (19, noise(3, 64, 576), torch.tensor([0.02])),
        (600, noise(10, 64, 656)),
    ):
        rows = cache.shape[0] * 64
        yield (
            *(randn(tokens, 2240), randn(1536), EPS, randn(128), randn(128), EPS),
            *(randn(512), EPS, *tables(tokens), True, False, True),
            *(cache, noise(rows // 64, 64, 132), slots_of(tokens, rows), *scale),
        )


def _head_weights() -> Iterator[Arguments]:
    for tokens in (1, 19):
        yield randn(tokens, 1024), torch.randn(64, 1024), 0.01


def _absorb_rope() -> Iterator[Arguments]:
    for tokens, heads in ((1, 128), (19, 16)):
        cos, sin = tables(tokens, torch.bfloat16)
        yield randn(tokens, heads, 192), randn(heads, 128, 512), cos, sin


def _expand_output() -> Iterator[Arguments]:
    for tokens, heads in ((1, 128), (19, 16)):
        yield randn(tokens, heads, 512), randn(heads, 128, 512)


# queries and context of each request: verification, empty requests, a prefill
_DECODES = ((1, 700), (2, 5), (0, 3), (1, 64), (1, 0), (4, 65))
_PREFILL = ((40, 300), (3, 3))


def _paged_topk() -> Iterator[Arguments]:
    for lengths in (_DECODES, _PREFILL):
        sequences = batch(lengths, 16)
        cache = randn(sequences[0].numel(), 16, 128)
        tokens = sum(n for n, _ in lengths) + 2  # two of padding
        yield randn(tokens, 64, 128), torch.randn(tokens, 64), cache, *sequences, 512, 0.1


def _paged_topk_fp8() -> Iterator[Arguments]:
    for lengths, block_size in ((_DECODES, 64), (_DECODES, 16), (_PREFILL, 32)):
        sequences = batch(lengths, block_size)
        pages = sequences[0].numel()
        keys = randn(pages, block_size * 128, dtype=E4M3).view(torch.uint8)
        scales = torch.rand(pages, block_size).add(0.5).view(torch.uint8)
        cache = torch.cat((keys, scales), 1).view(pages, block_size, 132)
        tokens = sum(n for n, _ in lengths) + 2
        q, weights = randn(tokens, 64, 128, dtype=E4M3), torch.randn(tokens, 64)
        yield q, weights, cache, *sequences, 512


def _attention(make: Callable[[int, int], tuple[Tensor, ...]], many: int) -> Callable[..., Any]:
    """Queries to a cache of ``make(blocks, block_size)``; ``many`` tokens make a prefill."""

    def samples() -> Iterator[Arguments]:
        for tokens, heads, keys in ((1, 128, 320), (3, 16, 77), (many, 64, 128)):
            cache, *scale = make(6, 64)
            slots = torch.rand(tokens, 6 * 64).argsort(1)[:, :keys].int()
            slots[-1, ::3] = -1
            slots[tokens // 2, 5:] = -1
            if tokens > 1:
                slots[1] = -1
            query = randn(tokens, heads, 512), randn(tokens, heads, 64)
            yield *query, cache, slots, 0.05, *scale

    return samples


def _attention_expand(make: Callable[[int, int], tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Tokens whose keys one block has, and few that several share."""

    def samples() -> Iterator[Arguments]:
        for sample in (*_attention(make, 70)(), *_attention(make, 7)()):
            yield *sample, randn(sample[0].shape[1], 128, 512), True

    return samples


def _prompt_attention(make: Callable[[int, int], tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Prompts that fill a block of queries together, longer ones, padding, and other widths."""

    def samples() -> Iterator[Arguments]:
        for lengths, heads, nope, values in (
            ((1,), 128, 128, 128), ((3, 70, 1), 16, 128, 128), ((200, 33), 4, 48, 80),
        ):  # fmt: skip
            cache, *scale = make(6, 64)
            positions = torch.cat([torch.arange(n) for n in (*lengths, 1)])
            slots = torch.randperm(6 * 64)[: len(positions)]
            slots[-1] = -1
            query = randn(len(positions), heads, nope), randn(len(positions), heads, 64)
            weights = randn(heads, nope, 512), randn(heads, values, 512)
            yield *query, cache, slots, positions, *weights, 0.05, *scale
            chosen = slots[torch.randint(len(slots), (len(slots), 50))].int()
            yield *query, cache, slots, positions, *weights, 0.05, *scale, chosen

    return samples


def _bf16_cache(blocks: int, block_size: int) -> tuple[Tensor, ...]:
    return (randn(blocks, block_size, 576),)


def _fp8_cache(blocks: int, block_size: int) -> tuple[Tensor, ...]:
    rows = blocks * block_size
    parts = randn(rows, 512, dtype=E4M3), torch.rand(rows, 4) + 0.5, randn(rows, 64)
    packed = torch.cat([part.view(torch.uint8) for part in parts], 1)
    return (packed.view(blocks, block_size, 656),)


def _fp8_tensor_cache(blocks: int, block_size: int) -> tuple[Tensor, ...]:
    values = randn(blocks, block_size, 576, dtype=E4M3).view(torch.uint8)
    return values, torch.tensor([0.5])


def _weight(rows: int, k: int) -> tuple[Tensor, Tensor]:
    return randn(rows, k, dtype=E4M3), torch.rand(-(-rows // 128), k // 128)


def _linear_fp8() -> Iterator[Arguments]:
    for tokens, rows, k in ((1, 576, 1536), (13, 200, 384), (64, 136, 128), (300, 448, 640)):
        yield randn(tokens, k, dtype=E4M3), torch.rand(tokens, k // 128), *_weight(rows, k)


def _all_reduce_norm() -> Iterator[Arguments]:
    for x, residual, weight, eps, ue8m0 in _quantizing(_add_norm)():
        yield x, "tp", 1, residual, weight, eps, ue8m0


def _router() -> Iterator[Arguments]:
    for tokens, width in ((1, 300), (17, 300), (6, 1024)):
        weight, bias = randn(256, width), torch.randn(256)
        slots = slots_of(tokens, 64) if width == 1024 else None
        yield randn(tokens, width), weight, bias, 8, 4, 8, True, 2.5, int(tokens > 1), slots


def _choice(tokens: int, experts: int) -> tuple[Tensor, Tensor]:
    return torch.rand(tokens, 3), torch.randint(0, experts, (tokens, 3))


def _experts() -> Iterator[Arguments]:
    for tokens in (1, 40):
        matrices = randn(5, 2 * 72, 136), randn(5, 136, 72)
        yield randn(tokens, 136), *_choice(tokens, 5), *matrices


def _experts_fp8() -> Iterator[Arguments]:
    for tokens, hidden in ((1, 1024), (9, 512), (150, 512)):  # the first in one launch
        weights, indices = _choice(tokens, 3)
        indices[-1, 0] = -1  # an expert of another rank
        blocks = hidden // 128
        yield (
            *(randn(tokens, hidden, dtype=E4M3), torch.rand(tokens, blocks), weights, indices),
            *(randn(3, 512, hidden, dtype=E4M3), torch.rand(3, 4, blocks)),
            *(randn(3, hidden, 256, dtype=E4M3), torch.rand(3, blocks, 2)),
        )


SAMPLES: dict[str, Callable[[], Iterator[Arguments]]] = {
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "layer_norm": _layer_norm,
    "rms_norm_quantize": _quantizing(_norm),
    "rms_norm_quantize_keep": _quantizing(_norm),
    "add_rms_norm_quantize": _quantizing(_add_norm),
    "all_reduce_add_rms_norm_quantize": _all_reduce_norm,
    "swiglu": _swiglu,
    "swiglu_packed": _gate_up,
    "swiglu_packed_quantize": _quantizing(_gate_up),
    "quantize_blocks": _quantizing(_blocks),
    "embedding": _embedding,
    "rope_tables": _rope_tables,
    "rope_interleaved": _rope,
    "rope_half": _rope,
    "write_latent_cache": _write_latent,
    "write_index_cache": _write_index,
    "norm_rope_write_latent_cache_fp8": _norm_rope_write_fp8,
    "norm_rope_write_latent_cache_fp8_tensor": _norm_rope_write_tensor,
    "dense_slots": _dense_slots,
    "write_index_key_fp8": _write_index_fp8,
    "index_query_quantize": _index_query,
    "attention_inputs_fp8": _attention_inputs,
    "index_head_weights": _head_weights,
    "absorb_rope_query": _absorb_rope,
    "expand_output_quantize": _quantizing(_expand_output),
    "paged_index_topk": _paged_topk,
    "paged_index_topk_fp8": _paged_topk_fp8,
    "paged_latent_attention": _attention(_bf16_cache, 40),
    "paged_latent_attention_fp8": _attention(_fp8_cache, 260),
    "paged_latent_attention_fp8_tensor": _attention(_fp8_tensor_cache, 260),
    "paged_latent_attention_fp8_expand": _attention_expand(_fp8_cache),
    "paged_latent_attention_fp8_tensor_expand": _attention_expand(_fp8_tensor_cache),
    "paged_prompt_attention": _prompt_attention(_bf16_cache),
    "paged_prompt_attention_fp8": _prompt_attention(_fp8_cache),
    "paged_prompt_attention_fp8_tensor": _prompt_attention(_fp8_tensor_cache),
    "linear_fp8": _linear_fp8,
    "router": _router,
    "experts": _experts,
    "experts_fp8": _experts_fp8,
}
"""By op: what makes its inputs."""
