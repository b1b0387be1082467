import pytest
import torch

from dsa_compile.passes.recognize_sparse_attention import RecognizeSparseAttention
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, INDEX_HEADS, WIDTH, TOP_K = 2, 16, 8, 16
SIZES = {"B": 2, "S": 24}
INPUTS = (
    value("q", "B", HEADS, "S", WIDTH),
    value("k", "B", HEADS, "S", WIDTH),
    value("v", "B", HEADS, "S", WIDTH),
    value("iq", "B", "S", INDEX_HEADS, WIDTH),
    value("ik", "B", "S", WIDTH),
    value("iw", "B", "S", INDEX_HEADS),
    value("causal_mask", "B", 1, "S", "S", dtype=torch.bool),
)
CAUSAL = torch.ones(24, 24, dtype=torch.bool).tril().expand(2, 1, 24, 24)


def scores(iq, ik, iw, mask):
    keys = aten.unsqueeze.default(aten.transpose.int(ik, -1, -2), 1)
    dots = aten.mul.Tensor(aten.matmul.default(iq, keys), 0.5)
    weights = aten.unsqueeze.default(iw, -2)
    total = aten.squeeze.dim(aten.matmul.default(weights, aten.relu.default(dots)), -2)
    hidden = aten.bitwise_not.default(aten.select.int(mask, 1, 0))
    return aten.masked_fill.Scalar(total, hidden, -float("inf"))


def attention(q, k, v, chosen, mask, shape):
    dropped = aten.new_ones.default(chosen, shape, dtype=torch.bool)
    dropped = aten.scatter.value(dropped, -1, aten.to.dtype(chosen, torch.int64), False)
    keep = aten.bitwise_not.default(aten.unsqueeze.default(dropped, 1))
    mask = aten.__and__.Tensor(mask, keep)
    return aten.scaled_dot_product_attention.default(q, k, v, mask, scale=0.25)


def sizes(x):
    batch, length = aten.sym_size.int(x, 0), aten.sym_size.int(x, 1)
    return [batch, length, length]


def chosen(masked, count=TOP_K):
    return aten.to.dtype(aten.topk.default(masked, count)[1], torch.int32)


@pytest.mark.parametrize("at_most", [True, False])
def test_scores_and_masked_attention_become_two_ops(check: PassCheck, at_most: bool) -> None:
    @region("dense", *INPUTS)
    def before(q, k, v, iq, ik, iw, mask):
        count = torch.sym_min(aten.sym_size.int(ik, 1), TOP_K) if at_most else TOP_K
        indices = chosen(scores(iq, ik, iw, mask), count)
        return attention(q, k, v, indices, mask, sizes(ik))

    @region("dense", *INPUTS)
    def expected(q, k, v, iq, ik, iw, mask):
        indices = dsa.index_topk.default(iq, ik, iw, TOP_K, 0.5)
        q, k, v = (aten.transpose.int(x, 1, 2) for x in (q, k, v))
        out = dsa.sparse_attention.default(q, k, v, indices, 0.25)
        return aten.transpose.int(out, 1, 2)

    check(
        RecognizeSparseAttention(),
        before,
        expected,
        inputs={"causal_mask": CAUSAL},
        sizes=SIZES,
    )


def test_declines_another_mask_over_the_scores(check: PassCheck) -> None:
    other = value("other_mask", "B", 1, "S", "S", dtype=torch.bool)

    @region("dense", *INPUTS, other, path="self_attn")
    def before(q, k, v, iq, ik, iw, mask, other):
        indices = chosen(scores(iq, ik, iw, other))
        return attention(q, k, v, indices, mask, sizes(ik))

    assert check.declines(RecognizeSparseAttention(), before) == (
        "pass recognize_sparse_attention: matched 0 of 1 sites in 'dense' (2 layers); nearest "
        "miss: self_attn: node other_mask: 'causal_mask': is other_mask, not the input causal_mask"
    )


def test_declines_another_mask_over_the_attention(check: PassCheck) -> None:
    other = value("other_mask", "B", 1, "S", "S", dtype=torch.bool)

    @region("dense", *INPUTS, other, path="self_attn")
    def before(q, k, v, iq, ik, iw, mask, other):
        indices = chosen(scores(iq, ik, iw, mask))
        return attention(q, k, v, indices, other, sizes(ik))

    message = check.declines(RecognizeSparseAttention(), before)
    assert "is other_mask, not the input causal_mask" in message


def test_declines_head_weights_in_another_precision(check: PassCheck) -> None:
    inputs = [i if i.key != "iw" else value("iw", "B", "S", INDEX_HEADS, dtype=torch.bfloat16)
              for i in INPUTS]  # fmt: skip

    @region("dense", *inputs, path="self_attn.indexer")
    def before(q, k, v, iq, ik, iw, mask):
        narrow = [aten.to.dtype(x, torch.bfloat16) for x in (iq, ik)]
        indices = chosen(scores(*narrow, iw, mask))
        return attention(q, k, v, indices, mask, sizes(ik))

    message = check.declines(RecognizeSparseAttention(), before)
    assert "'weights': head weights are torch.bfloat16, not float32" in message


def test_declines_dots_in_another_precision(check: PassCheck) -> None:
    @region("dense", *INPUTS, path="self_attn.indexer")
    def before(q, k, v, iq, ik, iw, mask):
        keys = aten.unsqueeze.default(aten.transpose.int(ik, -1, -2), 1)
        narrow = [aten.to.dtype(x, torch.bfloat16) for x in (iq, keys)]
        dots = aten.to.dtype(aten.matmul.default(*narrow), torch.float32)
        heads = aten.relu.default(aten.mul.Tensor(dots, 0.5))
        total = aten.matmul.default(aten.unsqueeze.default(iw, -2), heads)
        hidden = aten.bitwise_not.default(aten.select.int(mask, 1, 0))
        total = aten.masked_fill.Scalar(aten.squeeze.dim(total, -2), hidden, -float("inf"))
        return attention(q, k, v, chosen(total), mask, sizes(ik))

    check.declines(RecognizeSparseAttention(), before)


def test_declines_a_topk_of_other_width(check: PassCheck) -> None:
    @region("dense", *INPUTS, path="self_attn.indexer")
    def before(q, k, v, iq, ik, iw, mask):
        indices = chosen(scores(iq, ik, iw, mask), 7)
        return attention(q, k, v, indices, mask, sizes(ik))

    message = check.declines(RecognizeSparseAttention(), before)
    assert "node topk_default: keeps 7 keys, not index_topk=16" in message
