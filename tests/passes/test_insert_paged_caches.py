import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.passes.insert_paged_caches import InsertPagedCaches
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, cache, region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

# the tiny model's: one cache row is as wide as its configuration says
HEADS, RANK, ROPE, INDEX_HEADS, INDEX_WIDTH, TOP_K = 2, 32, 16, 16, 32, 16
TOKENS, BLOCK = 40, 16
INPUTS = (
    value("q", "T", HEADS, RANK),
    value("q_pe", "T", HEADS, ROPE),
    value("ckv", "T", RANK),
    value("k_pe", "T", ROPE),
    value("iq", "T", INDEX_HEADS, INDEX_WIDTH),
    value("ik", "T", INDEX_WIDTH),
    value("iw", "T", INDEX_HEADS),
)
PAGED = (
    batch("slot_mapping", "T"),
    batch("block_tables", "R", "M", dtype=torch.int32),
    batch("cu_seqlens", "R+1", dtype=torch.int32),
    batch("context_lens", "R", dtype=torch.int32),
    cache("latent_cache", "P", BLOCK, RANK + ROPE),
    cache("index_cache", "P", BLOCK, INDEX_WIDTH),
)
TABLE = torch.tensor([4, 0, 2], dtype=torch.int32)  # one request in blocks out of order
STEP = {
    "slot_mapping": (
        TABLE.long()[:, None] * BLOCK + torch.arange(BLOCK)
    ).flatten()[:TOKENS],
    "block_tables": torch.cat([TABLE, torch.tensor([-1], dtype=torch.int32)])[None],
    "cu_seqlens": torch.tensor([0, TOKENS], dtype=torch.int32),
    "context_lens": torch.tensor([TOKENS], dtype=torch.int32),
    "latent_cache": torch.full((5, BLOCK, RANK + ROPE), float("nan")),
    "index_cache": torch.full((5, BLOCK, INDEX_WIDTH), float("nan")),
}  # fmt: skip


def test_one_sequence_becomes_paged_requests(check: PassCheck) -> None:
    @region("dense", *INPUTS)
    def before(q, q_pe, ckv, k_pe, iq, ik, iw):
        indices = dsa.index_topk.default(iq, ik, iw, TOP_K, 0.5)
        return dsa.latent_attention.default(q, q_pe, ckv, k_pe, indices, 0.25)

    @region("dense", *INPUTS, *PAGED)
    def expected(q, q_pe, ckv, k_pe, iq, ik, iw, slots, tables, starts, lengths, latent, index):
        dsa.write_index_cache.default(ik, index, slots)
        rows = dsa.paged_index_topk.default(
            iq, iw, index, tables, starts, lengths, TOP_K, 0.5
        )  # fmt: skip
        dsa.write_latent_cache.default(ckv, k_pe, latent, slots)
        return dsa.paged_latent_attention.default(q, q_pe, latent, rows, 0.25)

    check(
        InsertPagedCaches(),
        before,
        expected,
        sizes={"T": TOKENS},
        after_inputs=STEP,
        config=CompileConfig(block_size=BLOCK),
    )


def test_declines_indices_from_elsewhere(check: PassCheck) -> None:
    given = value("indices", "T", TOP_K, dtype=torch.int32)

    @region("dense", *INPUTS, given, path="self_attn")
    def before(q, q_pe, ckv, k_pe, iq, ik, iw, indices):
        return dsa.latent_attention.default(q, q_pe, ckv, k_pe, indices, 0.25)

    assert check.declines(InsertPagedCaches(), before) == (
        "pass insert_paged_caches: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "self_attn: node indices: found input indices where dsa.index_topk.default was expected"
    )
