import pytest
import torch

from dsa_compile.passes.quantize_indexer import QuantizeIndexer
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, batch, cache, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

BF16 = torch.bfloat16
HEADS, WIDTH, ROPE, TOKENS, BLOCK, TOP_K = 4, 32, 16, 40, 16, 8
EPS, SCALE = 1e-6, WIDTH**-0.5
INPUTS = (
    value("k", "T", WIDTH, dtype=BF16),
    value("q", "T", HEADS, WIDTH, dtype=BF16),
    value("weights", "T", HEADS),
    value("cos", "T", ROPE, dtype=BF16),
    value("sin", "T", ROPE, dtype=BF16),
    weight("self_attn.indexer.k_norm.weight", WIDTH, dtype=BF16),
    weight("self_attn.indexer.k_norm.bias", WIDTH, dtype=BF16),
    batch("slot_mapping", "T"),
    batch("block_tables", "R", "M", dtype=torch.int32),
    batch("cu_seqlens", "R+1", dtype=torch.int32),
    batch("context_lens", "R", dtype=torch.int32),
    value("slots", 5 * BLOCK, dtype=torch.int32),
)
PLAIN = cache("index_cache", "P", BLOCK, WIDTH, dtype=BF16)
PAGES = cache("index_cache", "P", BLOCK, WIDTH + 4, dtype=torch.uint8)
TABLE = torch.tensor([4, 0, 2], dtype=torch.int32)  # one request in blocks out of order
GIVEN = {
    "slots": torch.arange(5 * BLOCK, dtype=torch.int32),
    "slot_mapping": (TABLE.long()[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:TOKENS],
    "block_tables": torch.cat([TABLE, torch.tensor([-1], dtype=torch.int32)])[None],
    "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
    "context_lens": torch.tensor([TOKENS], dtype=torch.int32),
    "index_cache": torch.full((5, BLOCK, WIDTH), float("nan"), dtype=BF16),
}


def rotated(x, cos, sin, rotate):
    parts = aten.split_with_sizes.default(x, [ROPE, WIDTH - ROPE], -1)
    return aten.cat.default([rotate(parts[0], cos, sin), parts[1]], -1)


def membership(rows, slots):
    """``[T, slots]``: which slots each query chose, in whatever order."""
    equal = aten.eq.Tensor(aten.unsqueeze.default(rows, -1), slots)
    return aten.to.dtype(aten.any.dim(equal, 1), torch.float32)


def separate(rotate=dsa.rope_half.default, keep: bool = False) -> Sketch:
    @region(
        "dense",
        *INPUTS,
        PLAIN,
        outputs=("chosen", "keys") if keep else ("chosen",),
        path="self_attn",
    )
    def before(k, q, weights, cos, sin, w, b, slots, tables, starts, lengths, every, index):
        normed = dsa.layer_norm.default(k, w, b, EPS)
        wide = rotated(aten.unsqueeze.default(normed, 1), cos, sin, rotate)
        key = aten.squeeze.dim(wide, 1)
        dsa.write_index_cache.default(key, index, slots)
        query = rotated(q, cos, sin, rotate)
        rows = dsa.paged_index_topk.default(
            query, weights, index, tables, starts, lengths, TOP_K, SCALE
        )
        chosen = membership(rows, every)
        return (chosen, key) if keep else chosen

    return before


@pytest.mark.parametrize("rope", ["rope_half", "rope_interleaved"])
def test_keys_and_queries_move_to_fp8_together(check: PassCheck, rope: str) -> None:
    interleaved = rope == "rope_interleaved"

    @region("dense", *INPUTS, PAGES, outputs=("chosen",))
    def expected(k, q, weights, cos, sin, w, b, slots, tables, starts, lengths, every, index):
        dsa.write_index_key_fp8.default(k, w, b, EPS, cos, sin, interleaved, index, slots)
        pair = dsa.index_query_quantize.default(q, weights, cos, sin, interleaved, SCALE)
        rows = dsa.paged_index_topk_fp8.default(
            pair[0], pair[1], index, tables, starts, lengths, TOP_K
        )
        return membership(rows, every)

    pages = torch.full((5, BLOCK, WIDTH + 4), 255, dtype=torch.uint8)
    check(
        QuantizeIndexer(),
        separate(getattr(dsa, rope).default),
        expected,
        sizes={"T": TOKENS},
        inputs=GIVEN,
        after_inputs={"index_cache": pages},
        relative=0.3,  # 95 % of the choices: 2 (1 - overlap) is its square
        index_rope_interleaved=interleaved,
    )


def test_declines_keys_and_queries_rotated_otherwise(check: PassCheck) -> None:
    message = check.declines(QuantizeIndexer(), separate(dsa.rope_interleaved.default))
    assert message.startswith("pass quantize_indexer: matched 0 of 1 sites in 'dense' (2 layers)")
    assert message.endswith(
        "calls dsa.rope_interleaved.default where dsa.rope_half.default was expected"
    )


def test_declines_keys_that_are_read_elsewhere(check: PassCheck) -> None:
    message = check.declines(QuantizeIndexer(), separate(keep=True))
    assert message.endswith("self_attn: node squeeze_dim: extra user output outside the match")


def test_declines_a_selection_from_another_cache(check: PassCheck) -> None:
    other = cache("other_cache", "P", BLOCK, WIDTH, dtype=BF16)

    @region("dense", *INPUTS, PLAIN, other, outputs=("chosen",), path="self_attn")
    def odd(*given):
        k, q, weights, cos, sin, w, b, slots, tables, starts, lengths, every, index, other = given
        wide = rotated(
            aten.unsqueeze.default(dsa.layer_norm.default(k, w, b, EPS), 1),
            *(cos, sin, dsa.rope_half.default),
        )
        dsa.write_index_cache.default(aten.squeeze.dim(wide, 1), index, slots)
        query = rotated(q, cos, sin, dsa.rope_half.default)
        rows = dsa.paged_index_topk.default(
            query, weights, other, tables, starts, lengths, TOP_K, SCALE
        )
        return membership(rows, every)

    message = check.declines(QuantizeIndexer(), odd)
    assert message.endswith("reads other_cache, which no key fit to be quantised is written to")
