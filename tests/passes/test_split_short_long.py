import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.ir.region import Role
from dsa_compile.passes.split_short_long import SplitShortLong
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, cache, fragment, region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, RANK, ROPE, INDEX_HEADS, INDEX_WIDTH, TOP_K, BLOCK = 2, 32, 16, 16, 32, 16, 16
POSITIONS = batch("positions", "T")
STEP = (
    batch("block_tables", "R", "M", dtype=torch.int32),
    batch("cu_seqlens", "R+1", dtype=torch.int32),
    batch("context_lens", "R", dtype=torch.int32),
)
SLOTS = batch("slot_mapping", "T")
ATTENTION = (
    value("q", "T", HEADS, RANK),
    value("q_pe", "T", HEADS, ROPE),
    value("rows", "T", RANK + ROPE),
)
QUERY, HEAD_WEIGHTS = value("iq", "T", INDEX_HEADS, INDEX_WIDTH), value("iw", "T", INDEX_HEADS)
KEYS = value("ik", "T", INDEX_WIDTH)
LATENT = cache("latent_cache", "P", BLOCK, RANK + ROPE)
INDEX = cache("index_cache", "P", BLOCK, INDEX_WIDTH)
OUTPUTS = ("result",)
# two requests: one decodes its 13th token, the other prefills 6; both below index_topk
INPUTS = {
    "positions": torch.tensor([12, 0, 1, 2, 3, 4, 5]),
    "block_tables": torch.tensor([[2], [0]], dtype=torch.int32),
    "cu_seqlens": torch.tensor([0, 1, 7], dtype=torch.int32),
    "context_lens": torch.tensor([13, 6], dtype=torch.int32),
    "slot_mapping": torch.tensor([44, 0, 1, 2, 3, 4, 5]),
    "latent_cache": torch.randn(3, BLOCK, RANK + ROPE, generator=torch.Generator().manual_seed(0)),
    "index_cache": torch.randn(3, BLOCK, INDEX_WIDTH, generator=torch.Generator().manual_seed(1)),
}


@region("embed", POSITIONS, outputs=("angles",))
def embed(positions):
    return aten.to.dtype(positions, torch.float32)


@region(
    "dense", *ATTENTION, QUERY, HEAD_WEIGHTS, KEYS, SLOTS, *STEP, LATENT, INDEX, outputs=OUTPUTS
)
def long(q, q_pe, rows, iq, iw, ik, slots, tables, starts, lengths, latent, index):
    dsa.write_index_cache.default(ik, index, slots)
    chosen = dsa.paged_index_topk.default(
        iq, iw, index, tables, starts, lengths, TOP_K, 0.5
    )  # fmt: skip
    parts = aten.split_with_sizes.default(rows, [RANK, ROPE], -1)
    dsa.write_latent_cache.default(parts[0], parts[1], latent, slots)
    return dsa.paged_latent_attention.default(q, q_pe, latent, chosen, 0.25)


def test_short_takes_dense_rows_and_still_writes_the_indexers_keys(check: PassCheck) -> None:
    @region("embed.short", POSITIONS, *STEP, outputs=("angles", "dense_slots"))
    def short_embed(positions, tables, starts, lengths):
        rows = dsa.dense_slots.default(tables, starts, lengths, positions, BLOCK, TOP_K)
        return aten.to.dtype(positions, torch.float32), rows

    dense_slots = value("dense_slots", "T", TOP_K, dtype=torch.int32)

    @region("dense.short", *ATTENTION, KEYS, dense_slots, SLOTS, LATENT, INDEX, outputs=OUTPUTS)
    def short(q, q_pe, rows, ik, chosen, slots, latent, index):
        dsa.write_index_cache.default(ik, index, slots)
        parts = aten.split_with_sizes.default(rows, [RANK, ROPE], -1)
        dsa.write_latent_cache.default(parts[0], parts[1], latent, slots)
        return dsa.paged_latent_attention.default(q, q_pe, latent, chosen, 0.25)

    named = [
        region(f"{s.name}.long", *s.inputs, outputs=s.outputs)(s.function) for s in (embed, long)
    ]
    check(
        SplitShortLong(),
        [embed, long],
        [*named, short_embed, short],
        rewrites={"dense": 1},
        inputs=INPUTS,
        sizes={"T": 7},
        config=CompileConfig(block_size=BLOCK),
    )


def test_both_variants_share_one_plan_and_the_head() -> None:
    program = fragment(embed, long, config=CompileConfig(block_size=BLOCK))
    SplitShortLong()(program)
    assert program.variants == ("long", "short")
    assert program.region("head", "long") is program.region("head", "short")
    short = program.region("dense", "short")
    assert {node.meta["key"] for node in short.inputs_of(Role.VALUE)} & {"iq", "iw"} == set()


def test_a_layer_without_topk_is_an_error(check: PassCheck) -> None:
    @region("dense", value("x", "T", 8), outputs=OUTPUTS)
    def before(x):
        return aten.neg.default(x)

    assert check.declines(SplitShortLong(), [embed, before], untouched=False) == (
        "pass split_short_long: matched 0 of 1 sites in 'dense' (2 layers); "
        "nearest miss: nothing came near"
    )
