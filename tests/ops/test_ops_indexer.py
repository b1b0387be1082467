import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsa_compile.ops import indexer
from dsa_compile.ops.selection import best_first

HEADS, DIM = 5, 6
TOPK = [1, 8, 64]  # contexts of the shared batches reach 40: below, across and above


def naive(q, weights, keys, topk, scale):
    """fp64 scores of one query over its visible keys; best first, ties to the lower position."""
    scores = (torch.relu(scale * (keys.double() @ q.double().T)) * weights.double()).sum(1)
    return torch.sort(scores, descending=True, stable=True).indices[:topk].tolist()


def exact_inputs(tokens, num_keys, heads=HEADS, dim=DIM, dtype=torch.float32):
    """Small integers: fp32 is exact whatever the order of sums, and ties are plentiful."""
    q = torch.randint(-2, 3, (tokens, heads, dim)).to(dtype)
    weights = torch.randint(-3, 4, (tokens, heads)).float() / 4
    return q, weights, torch.randint(-2, 3, (num_keys, dim)).to(dtype)


def paged_inputs(batch, dtype=torch.float32):
    rows = batch.num_blocks * batch.block_size
    q, weights, keys = exact_inputs(batch.num_tokens, rows, dtype=dtype)
    return q, weights, keys.view(batch.num_blocks, batch.block_size, DIM)


def naive_paged(batch, q, weights, cache, topk, scale):
    out = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    flat = cache.flatten(0, 1)
    for t in range(batch.num_tokens):
        rows = torch.tensor(batch.visible(t), dtype=torch.int64)
        best = naive(q[t], weights[t], flat[rows], topk, scale)
        out[t, : len(best)] = rows[best].int()
    return out


@pytest.fixture(params=["one-chunk", "tiny-chunks"])
def chunks(request, monkeypatch):
    if request.param == "tiny-chunks":
        monkeypatch.setattr(indexer, "SCORE_BYTES", 1)
        monkeypatch.setattr(indexer, "_SMALL_BATCH", 0)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", TOPK)
def test_paged_selection_is_exact(batch, topk, dtype):
    q, weights, cache = paged_inputs(batch, dtype)
    got = torch.ops.dsa.paged_index_topk(q, weights, cache, *batch.index_args(), topk, 0.5)
    assert got.dtype is torch.int32
    assert torch.equal(got, naive_paged(batch, q, weights, cache, topk, 0.5))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("topk", TOPK)
@pytest.mark.parametrize("shape", [(1, 1), (2, 37), (3, 8), (1, 0), (0, 4)], ids=str)
def test_dense_selection_is_exact(shape, topk, dtype):
    batch, length = shape
    q, weights, keys = exact_inputs(batch * length, batch * length, dtype=dtype)
    q, weights = q.view(*shape, HEADS, DIM), weights.view(*shape, HEADS)
    keys = keys.view(*shape, DIM)
    expected = torch.full((batch, length, topk), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(length):
            best = naive(q[b, t], weights[b, t], keys[b, : t + 1], topk, 0.5)
            expected[b, t, : len(best)] = torch.tensor(best)
    assert torch.equal(torch.ops.dsa.index_topk(q, keys, weights, topk, 0.5), expected)


def test_without_a_batch_dimension_it_is_one_sequence():
    q, weights, keys = exact_inputs(11, 11)
    got = torch.ops.dsa.index_topk(q, keys, weights, 4, 0.5)
    assert torch.equal(got, torch.ops.dsa.index_topk(q[None], keys[None], weights[None], 4, 0.5)[0])


REQUESTS = st.lists(
    st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(n, n + 30))), max_size=6
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=REQUESTS,
    padding=st.integers(0, 2),
    block_size=st.sampled_from([1, 4, 16]),
    topk=st.integers(1, 20),
    budget=st.sampled_from([1, 4000, 4 << 20]),
)
def test_any_mix_of_requests_is_exact(paged_batch, requests, padding, block_size, topk, budget):
    batch = paged_batch(requests, block_size=block_size, padding=padding)
    q, weights, cache = paged_inputs(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexer, "SCORE_BYTES", budget)
        patch.setattr(indexer, "_SMALL_BATCH", min(budget, 64))
        got = torch.ops.dsa.paged_index_topk(q, weights, cache, *batch.index_args(), topk, 0.5)
    assert torch.equal(got, naive_paged(batch, q, weights, cache, topk, 0.5))


def test_selection_of_real_numbers_is_right_up_to_rounding(paged_batch):
    batch = paged_batch([(1, 300), (40, 170), (1, 90), (64, 64)], block_size=16)
    cache = torch.randn(batch.num_blocks, 16, DIM)
    q, weights = torch.randn(batch.num_tokens, 16, DIM), torch.randn(batch.num_tokens, 16)
    got = torch.ops.dsa.paged_index_topk(q, weights, cache, *batch.index_args(), 32, 0.4)
    flat = cache.flatten(0, 1).double()
    for t in range(batch.num_tokens):
        rows = batch.visible(t)
        scores = torch.relu(0.4 * flat[rows] @ q[t].double().T) @ weights[t].double()
        score_of = dict(zip(rows, scores.tolist(), strict=True))
        picked = [slot for slot in got[t].tolist() if slot >= 0]
        assert len(set(picked)) == len(picked) == min(32, len(rows))
        values = [score_of.pop(slot) for slot in picked]
        assert all(a >= b - 1e-5 for a, b in itertools.pairwise(values))
        assert max(score_of.values(), default=-1e9) <= values[-1] + 1e-5


def test_equal_scores_come_in_order_of_position(paged_batch):
    batch = paged_batch([(1, 30), (6, 23)], seed=3)
    q, weights, cache = paged_inputs(batch)
    for zeroed in (0.0, -0.0):
        got = torch.ops.dsa.paged_index_topk(
            q, weights * zeroed, cache, *batch.index_args(), 8, 0.5
        )
        expected = [batch.visible(t)[:8] for t in range(batch.num_tokens)]
        assert got.tolist() == expected


def test_best_first_takes_both_zeros_for_one_value():
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([[-0.0, 0.0, -0.0, 1e-45, -1e-45, inf, -inf, 2.0, -3.0, 2.0, nan]])
    assert best_first(scores, 11).tolist() == [[10, 5, 7, 9, 3, 0, 1, 2, 4, 8, 6]]
    assert best_first(scores, 3).tolist() == [[10, 5, 7]]


def test_other_requests_and_unused_pages_are_not_read(paged_batch):
    batch = paged_batch([(1, 21), (1, 6), (5, 14), (1, 17)], seed=5)
    q, weights, cache = paged_inputs(batch)
    expected = torch.ops.dsa.paged_index_topk(q, weights, cache, *batch.index_args(), 8, 0.5)
    poisoned = torch.full_like(cache, float("nan"))
    healthy = torch.tensor([*batch.rows[0], *batch.rows[2]])
    poisoned.view(-1, DIM)[healthy] = cache.view(-1, DIM)[healthy]
    got = torch.ops.dsa.paged_index_topk(q, weights, poisoned, *batch.index_args(), 8, 0.5)
    for t, (request, _) in enumerate(batch.tokens):
        if request in (0, 2):
            assert torch.equal(got[t], expected[t])
        assert set(got[t].tolist()) <= {-1, *batch.rows[request]}


def test_decode_batches_of_unlike_lengths_are_split(paged_batch):
    lengths = [7000, 12, 30, 6100, 9, 3000, 1, 25] + [16] * 40
    batch = paged_batch([(1, n) for n in lengths], block_size=16)
    groups = list(indexer._alike(batch.context_lens.numpy(), 4))
    assert sorted(r for group in groups for r in group.tolist()) == list(range(len(lengths)))
    assert [r for group in groups[:-1] for r in group.tolist()] == [0, 3, 5]
    rows = batch.num_blocks * 16
    q, weights, keys = exact_inputs(batch.num_tokens, rows)
    cache = keys.view(-1, 16, DIM)
    got = torch.ops.dsa.paged_index_topk(q, weights, cache, *batch.index_args(), 8, 0.5)
    assert torch.equal(got, naive_paged(batch, q, weights, cache, 8, 0.5))


@pytest.mark.parametrize("key_bytes", [4, 300, 1 << 30])
def test_decode_batches_respect_the_budget(key_bytes):
    lengths = torch.randint(1, 3000, (200,), dtype=torch.int32).numpy()
    groups = list(indexer._alike(lengths, key_bytes))
    assert sorted(r for group in groups for r in group.tolist()) == list(range(200))
    for group in groups:
        size = len(group) * int(lengths[group].max()) * key_bytes
        assert size <= indexer.SCORE_BYTES or len(group) == 1


def test_prefill_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(indexer, "SCORE_BYTES", 1 << 16)
    largest = 0
    real = torch.empty

    def spy(*size, **options):
        nonlocal largest
        out = real(*size, **options)
        largest = max(largest, out.nbytes)
        return out

    monkeypatch.setattr(torch, "empty", spy)
    q, weights, keys = exact_inputs(600, 600)
    indexer.index_topk(q[None], keys[None], weights[None], 8, 0.5)
    assert 0 < largest <= 1 << 16


def test_wrong_calls_are_refused(paged_batch):
    batch = paged_batch([(1, 9)])
    q, weights, cache = paged_inputs(batch)
    with pytest.raises(ValueError, match="dsa::paged_index_topk takes weights as float32"):
        torch.ops.dsa.paged_index_topk(q, weights.bfloat16(), cache, *batch.index_args(), 8, 0.5)
    with pytest.raises(ValueError, match="contexts within their block tables, not 99 tokens"):
        torch.ops.dsa.paged_index_topk(
            q, weights, cache, batch.block_tables, batch.cu_seqlens,
            torch.tensor([99], dtype=torch.int32), 8, 0.5,
        )  # fmt: skip
    with pytest.raises(ValueError, match="dsa::index_topk takes weights as float32"):
        torch.ops.dsa.index_topk(q[None], q[None, :, 0], weights, 8, 0.5)
