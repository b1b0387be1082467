import pytest
import torch

from dsa_compile.ops import attention

H, R, DR = 3, 10, 4


def naive(q, k, v, scale):
    """fp64, one query and one head: q [D], k [n, D], v [n, Dv]."""
    if not len(k):
        return torch.zeros(v.shape[-1], dtype=torch.float64)
    weights = torch.softmax(scale * (k.double() @ q.double()), 0)
    return weights @ v.double()


def close(got, expected, dtype):
    assert got.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def causal_choice(batch, length, width):
    """Distinct visible positions in random places of the row, -1 elsewhere; some rows empty."""
    out = torch.full((batch, length, width), -1, dtype=torch.int32)
    for b in range(batch):
        for t in range(length):
            count = min(int(torch.randint(0, width + 1, ())), t + 1)
            places = torch.randperm(width)[:count]
            out[b, t, places] = torch.randperm(t + 1)[:count].int()
    return out


@pytest.fixture(params=["one-chunk", "tiny-chunks"])
def chunks(request, monkeypatch):
    if request.param == "tiny-chunks":
        monkeypatch.setattr(attention, "GATHER_BYTES", 1)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (2, 13), (1, 0), (0, 3)], ids=str)


@pytest.mark.usefixtures("chunks")
@DTYPES
@SHAPES
def test_sparse_attention_is_the_formula(shape, dtype):
    q, k = torch.randn(*shape, H, 6).to(dtype), torch.randn(*shape, H, 6).to(dtype)
    v = torch.randn(*shape, H, 5).to(dtype)
    indices = causal_choice(*shape, 7)
    expected = torch.zeros(*shape, H, 5, dtype=torch.float64)
    for b in range(shape[0]):
        for t in range(shape[1]):
            chosen = [i for i in indices[b, t].tolist() if i >= 0]
            for h in range(H):
                expected[b, t, h] = naive(q[b, t, h], k[b, chosen, h], v[b, chosen, h], 0.4)
    close(torch.ops.dsa.sparse_attention(q, k, v, indices, 0.4), expected, dtype)


@pytest.mark.usefixtures("chunks")
@DTYPES
@SHAPES
def test_latent_attention_is_the_formula(shape, dtype):
    q_latent, q_pe = torch.randn(*shape, H, R).to(dtype), torch.randn(*shape, H, DR).to(dtype)
    ckv, k_pe = torch.randn(*shape, R).to(dtype), torch.randn(*shape, DR).to(dtype)
    indices = causal_choice(*shape, 7)
    expected = torch.zeros(*shape, H, R, dtype=torch.float64)
    keys, queries = torch.cat((ckv, k_pe), -1), torch.cat((q_latent, q_pe), -1)
    for b in range(shape[0]):
        for t in range(shape[1]):
            chosen = [i for i in indices[b, t].tolist() if i >= 0]
            for h in range(H):
                expected[b, t, h] = naive(queries[b, t, h], keys[b, chosen], ckv[b, chosen], 0.4)
    got = torch.ops.dsa.latent_attention(q_latent, q_pe, ckv, k_pe, indices, 0.4)
    close(got, expected, dtype)


def test_without_a_batch_dimension_it_is_one_sequence():
    q, v = torch.randn(1, 9, H, 6), torch.randn(1, 9, H, 5)
    ckv, k_pe = torch.randn(1, 9, R), torch.randn(1, 9, DR)
    indices = causal_choice(1, 9, 4)
    for op, args in (
        (torch.ops.dsa.sparse_attention, (q, q + 1, v, indices)),
        (
            torch.ops.dsa.latent_attention,
            (torch.randn(1, 9, H, R), torch.randn(1, 9, H, DR), ckv, k_pe, indices),
        ),
    ):
        assert torch.equal(op(*(a[0] for a in args), 0.4), op(*args, 0.4)[0])


def test_absorption_changes_the_form_not_the_result():
    """Head form on expanded keys and values = latent form between absorb and expand, in fp64."""
    shape, dn, dv = (2, 11), 6, 5
    doubles = {"dtype": torch.float64}
    q_nope, q_pe = torch.randn(*shape, H, dn, **doubles), torch.randn(*shape, H, DR, **doubles)
    ckv, k_pe = torch.randn(*shape, R, **doubles), torch.randn(*shape, DR, **doubles)
    w_uk, w_uv = torch.randn(H, dn, R, **doubles), torch.randn(H, dv, R, **doubles)
    k = torch.cat(
        (
            torch.einsum("bsr,hdr->bshd", ckv, w_uk),
            k_pe.unsqueeze(2).expand(*shape, H, DR),
        ),
        -1,
    )
    v = torch.einsum("bsr,hdr->bshd", ckv, w_uv)
    indices = causal_choice(*shape, 6)
    head_form = torch.ops.dsa.sparse_attention(
        torch.cat((q_nope, q_pe), -1).float(), k.float(), v.float(), indices, 0.2
    )
    q_latent = torch.ops.dsa.absorb_query(q_nope, w_uk)
    latent = torch.ops.dsa.latent_attention(
        q_latent.float(), q_pe.float(), ckv.float(), k_pe.float(), indices, 0.2
    )
    got = torch.ops.dsa.expand_output(latent, w_uv.float())
    torch.testing.assert_close(got, head_form, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (0,), (1,)], ids=str)
def test_per_head_products_are_the_formula(lead):
    x, w = torch.randn(*lead, H, 6), torch.randn(H, 6, R)
    expected = torch.einsum("...hd,hdr->...hr", x.double(), w.double())
    got = torch.ops.dsa.absorb_query(x, w)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    o, w = torch.randn(*lead, H, R), torch.randn(H, 5, R)
    expected = torch.einsum("...hr,hdr->...hd", o.double(), w.double())
    got = torch.ops.dsa.expand_output(o, w)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def paged_inputs(tokens, num_rows, dtype=torch.float32):
    q_latent, q_pe = torch.randn(tokens, H, R).to(dtype), torch.randn(tokens, H, DR).to(dtype)
    return q_latent, q_pe, torch.randn(num_rows, R + DR).to(dtype)


def naive_paged(q_latent, q_pe, rows, slots, scale):
    out = torch.zeros(q_latent.shape, dtype=torch.float64)
    for t in range(q_latent.shape[0]):
        keys = rows[[s for s in slots[t].tolist() if s >= 0]]
        for h in range(q_latent.shape[1]):
            query = torch.cat((q_latent[t, h], q_pe[t, h]))
            out[t, h] = naive(query, keys, keys[:, : q_latent.shape[2]], scale)
    return out


@pytest.mark.usefixtures("chunks")
@DTYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (17, 9), (0, 5), (4, 0)])
@pytest.mark.parametrize("trailing", [True, False])
def test_paged_latent_attention_is_the_formula(tokens, width, trailing, dtype):
    q_latent, q_pe, rows = paged_inputs(tokens, 40, dtype)
    slots = torch.full((tokens, width), -1, dtype=torch.int32)
    for t in range(tokens):
        count = t % (width + 1)
        places = torch.arange(count) if trailing else torch.randperm(width)[:count]
        slots[t, places] = torch.randperm(40)[:count].int()
    cache = rows.view(10, 4, R + DR)
    got = torch.ops.dsa.paged_latent_attention(q_latent, q_pe, cache, slots, 0.3)
    close(got, naive_paged(q_latent, q_pe, rows, slots, 0.3), dtype)


@DTYPES
def test_paged_latent_attention_with_every_slot_used(dtype):
    q_latent, q_pe, rows = paged_inputs(6, 40, dtype)
    slots = torch.stack([torch.randperm(40)[:16].int() for _ in range(6)])
    cache = rows.view(10, 4, R + DR)
    got = torch.ops.dsa.paged_latent_attention(q_latent, q_pe, cache, slots, 0.3)
    close(got, naive_paged(q_latent, q_pe, rows, slots, 0.3), dtype)


def test_without_any_slot_the_result_is_zero():
    q_latent, q_pe, rows = paged_inputs(3, 8)
    rows.fill_(float("nan"))
    slots = torch.full((3, 5), -1, dtype=torch.int32)
    got = torch.ops.dsa.paged_latent_attention(q_latent, q_pe, rows.view(2, 4, -1), slots, 0.3)
    assert torch.equal(got, torch.zeros(3, H, R))


@pytest.mark.parametrize("bad_row", [0, 7])
def test_a_nan_row_stays_with_the_tokens_that_chose_it(bad_row):
    q_latent, q_pe, rows = paged_inputs(4, 8)
    slots = torch.tensor(
        [[1, 2, -1, -1], [bad_row, 3, 4, -1], [-1, 5, -1, -1], [-1, -1, -1, -1]],
        dtype=torch.int32,
    )
    expected = torch.ops.dsa.paged_latent_attention(q_latent, q_pe, rows.view(2, 4, -1), slots, 0.3)
    rows[bad_row] = float("nan")
    got = torch.ops.dsa.paged_latent_attention(q_latent, q_pe, rows.view(2, 4, -1), slots, 0.3)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], expected[[0, 2, 3]])


def test_large_scores_do_not_overflow():
    q_latent, q_pe, rows = paged_inputs(2, 8)
    slots = torch.tensor([[1, 2, 5], [3, -1, -1]], dtype=torch.int32)
    got = torch.ops.dsa.paged_latent_attention(
        q_latent * 1e4, q_pe * 1e4, rows.view(2, 4, -1), slots, 1.0
    )
    expected = naive_paged(q_latent * 1e4, q_pe * 1e4, rows, slots, 1.0)
    close(got, expected, torch.float32)
