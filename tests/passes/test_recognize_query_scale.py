import torch

from dsa_compile.passes.recognize_query_scale import RecognizeQueryScale
from tests.passes.conftest import PassCheck
from tests.passes.sketch import SIZES, batch, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (
    value("query", "B", 4, "S", 16),
    value("index_query", "B", "S", 8, 12),
    batch("positions", "B", "S"),
    weight("self_attn.softmax_scaling.scale", 4),
    weight("self_attn.softmax_scaling.bias", 4),
    weight("self_attn.indexer.softmax_scaling.scale", 8),
    weight("self_attn.indexer.softmax_scaling.bias", 8),
)
POSITIONS = torch.arange(SIZES["B"] * SIZES["S"]).view(SIZES["B"], SIZES["S"])
OUTPUTS = ("query_out", "index_query_out")


def factor(positions, scale, bias, tokens, heads, rounded=torch.float32):
    after = aten.to.dtype(aten.add.Tensor(positions, 1), torch.float32)
    log = aten.log.default(after)
    log = log if rounded is torch.float32 else aten.to.dtype(log, rounded)
    column = aten.unsqueeze.default(log, heads)
    scale, bias = (
        aten.unsqueeze.default(aten.unsqueeze.default(x, 0), tokens) for x in (scale, bias)
    )
    return aten.unsqueeze.default(aten.add.Tensor(aten.mul.Tensor(scale, column), bias), -1)


def test_queries_of_attention_and_indexer_become_one_op_each(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS)
    def before(query, index_query, positions, scale, bias, index_scale, index_bias):
        of_query = factor(positions, scale, bias, 2, 1)
        of_index = factor(positions, index_scale, index_bias, 1, 2)
        return aten.mul.Tensor(query, of_query), aten.mul.Tensor(index_query, of_index)

    @region("dense", *INPUTS, outputs=OUTPUTS)
    def expected(query, index_query, positions, scale, bias, index_scale, index_bias):
        turned = aten.transpose.int(query, 1, 2)
        scaled = dsa.scale_by_position.default(turned, positions, scale, bias)
        index = dsa.scale_by_position.default(index_query, positions, index_scale, index_bias)
        return aten.transpose.int(scaled, 1, 2), index

    given = {"positions": POSITIONS}
    check(RecognizeQueryScale(), before, expected, rewrites=2, inputs=given, scaled_queries=True)


def test_declines_the_logarithm_of_another_number(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS, path="self_attn")
    def before(query, index_query, positions, scale, bias, index_scale, index_bias):
        of_query = factor(aten.mul.Tensor(positions, 2), scale, bias, 2, 1)
        shifted = aten.add.Tensor(positions, 2)
        column = aten.log.default(aten.to.dtype(shifted, torch.float32))
        rows = (aten.unsqueeze.default(x, 0) for x in (index_scale, index_bias))
        one, other = (aten.unsqueeze.default(x, 1) for x in rows)
        product = aten.mul.Tensor(one, aten.unsqueeze.default(column, 2))
        of_index = aten.unsqueeze.default(aten.add.Tensor(product, other), -1)
        return aten.mul.Tensor(query, of_query), aten.mul.Tensor(index_query, of_index)

    message = check.declines(RecognizeQueryScale(), before, untouched=False, scaled_queries=True)
    assert message.startswith("pass recognize_query_scale: matched 1 of 2 sites in 'dense'")


def test_declines_a_logarithm_that_is_rounded_and_queries_that_are_not(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS, path="self_attn")
    def before(query, index_query, positions, scale, bias, index_scale, index_bias):
        of_query = factor(positions, scale, bias, 2, 1, torch.bfloat16)
        of_index = factor(positions, index_scale, index_bias, 1, 2)
        return aten.mul.Tensor(query, of_query), aten.mul.Tensor(index_query, of_index)

    message = check.declines(RecognizeQueryScale(), before, untouched=False, scaled_queries=True)
    assert "scales torch.float32 by a logarithm in torch.bfloat16" in message
