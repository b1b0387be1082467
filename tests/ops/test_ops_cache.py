import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_land_in_their_rows_and_nowhere_else(batch, dtype):
    tokens = batch.num_tokens
    ckv, k_pe = torch.randn(tokens, 6).to(dtype), torch.randn(tokens, 2).to(dtype)
    keys = torch.randn(tokens, 5).to(dtype)
    latent = torch.randn(batch.num_blocks, batch.block_size, 8).to(dtype)
    index = torch.randn(batch.num_blocks, batch.block_size, 5).to(dtype)
    expected_latent, expected_index = latent.clone(), index.clone()
    for t, slot in enumerate(batch.slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, batch.block_size)
            expected_latent[block, offset, :6], expected_latent[block, offset, 6:] = ckv[t], k_pe[t]
            expected_index[block, offset] = keys[t]
    assert torch.ops.dsa.write_latent_cache(ckv, k_pe, latent, batch.slot_mapping) is None
    assert torch.ops.dsa.write_index_cache(keys, index, batch.slot_mapping) is None
    assert torch.equal(latent, expected_latent)
    assert torch.equal(index, expected_index)


def test_the_last_row_is_not_slot_minus_one():
    cache = torch.zeros(2, 2, 3)
    torch.ops.dsa.write_index_cache(torch.ones(3, 3), cache, torch.tensor([-1, 1, -1]))
    assert cache.flatten(0, 1).sum(1).tolist() == [0, 3, 0, 0]


def test_writes_outside_the_cache_fail():
    cache = torch.zeros(2, 2, 3)
    with pytest.raises(IndexError):
        torch.ops.dsa.write_index_cache(torch.ones(1, 3), cache, torch.tensor([4]))
    with pytest.raises(RuntimeError):  # a cache whose rows are not one after another
        torch.ops.dsa.write_index_cache(
            torch.ones(1, 3), torch.zeros(2, 4, 3)[:, :2], torch.tensor([0])
        )


@pytest.mark.parametrize("width", [40, 41, 64])
def test_dense_slots_list_the_visible_rows_in_order(batch, width):
    got = torch.ops.dsa.dense_slots(*batch.index_args(), batch.positions, batch.block_size, width)
    rows = [batch.visible(t) for t in range(batch.num_tokens)]
    expected = [r + [-1] * (width - len(r)) for r in rows]
    assert got.dtype is torch.int32
    assert got.shape == (batch.num_tokens, width)
    assert got.tolist() == expected


def test_dense_slots_are_what_an_all_taking_indexer_would_choose(batch):
    dense = torch.ops.dsa.dense_slots(*batch.index_args(), batch.positions, batch.block_size, 48)
    q, weights = torch.zeros(batch.num_tokens, 2, 3), torch.zeros(batch.num_tokens, 2)
    cache = torch.zeros(batch.num_blocks, batch.block_size, 3)
    chosen = torch.ops.dsa.paged_index_topk(q, weights, cache, *batch.index_args(), 48, 1.0)
    assert torch.equal(dense, chosen)


def test_a_context_of_a_million_tokens():
    """Lengths and cache rows are int32: keys are found at both ends, in blocks out of order."""
    length, block_size = 2**20, 64
    blocks = length // block_size
    table = torch.arange(blocks, dtype=torch.int32).flip(0)[None]
    positions = [0, 1, length // 2 + 1, length - 2, length - 1]
    rows = [int(table[0, p // block_size]) * block_size + p % block_size for p in positions]
    cache = torch.zeros(blocks, block_size, 2)
    cache.view(-1, 2)[rows] = 1.0
    chosen = torch.ops.dsa.paged_index_topk(
        *(torch.ones(1, 1, 2), torch.ones(1, 1), cache, table),
        *(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)),
        *(len(rows), 1.0),
    )
    assert sorted(chosen[0].tolist()) == sorted(rows)
