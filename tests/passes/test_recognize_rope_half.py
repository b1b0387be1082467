import torch

from dsa_compile.passes.recognize_rope_half import RecognizeRopeHalf
from dsa_compile.passes.shared import END
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (
    value("query", "B", "S", 4, 16),
    value("key", "B", "S", 1, 16),
    value("cos", "B", "S", 16),
    value("sin", "B", "S", 16),
)
OUTPUTS = ("query_out", "key_out")


def rotate(x, c, s, half=8):
    lower, upper = aten.slice.Tensor(x, 3, 0, half), aten.slice.Tensor(x, 3, half, END)
    turned = aten.cat.default([aten.neg.default(upper), lower], -1)
    return aten.add.Tensor(aten.mul.Tensor(x, c), aten.mul.Tensor(turned, s))


def test_queries_and_key_become_one_op_each(check: PassCheck) -> None:
    @region("moe", *INPUTS, outputs=OUTPUTS)
    def before(query, key, cos, sin):
        c, s = aten.unsqueeze.default(cos, 2), aten.unsqueeze.default(sin, 2)
        return rotate(query, c, s), rotate(key, c, s)

    @region("moe", *INPUTS, outputs=OUTPUTS)
    def expected(query, key, cos, sin):
        return tuple(dsa.rope_half.default(x, cos, sin) for x in (query, key))

    check(RecognizeRopeHalf(), before, expected, rewrites=2)


def test_declines_tables_that_are_computed(check: PassCheck) -> None:
    @region("moe", *INPUTS, outputs=OUTPUTS, path="self_attn.indexer")
    def before(query, key, cos, sin):
        c = aten.unsqueeze.default(aten.neg.default(cos), 2)
        s = aten.unsqueeze.default(sin, 2)
        return rotate(query, c, s), rotate(key, c, s)

    assert check.declines(RecognizeRopeHalf(), before) == (
        "pass recognize_rope_half: matched 0 of 2 sites in 'moe' (2 layers); nearest miss: "
        "self_attn.indexer: node neg_default: 'cos': is neg_default, not the input cos"
    )


def test_declines_parts_that_are_not_halves(check: PassCheck) -> None:
    @region("moe", *INPUTS, outputs=OUTPUTS, path="self_attn.indexer")
    def before(query, key, cos, sin):
        c, s = aten.unsqueeze.default(cos, 2), aten.unsqueeze.default(sin, 2)
        return rotate(query, c, s, half=4), rotate(key, c, s, half=4)

    message = check.declines(RecognizeRopeHalf(), before)
    assert message.endswith("node add_tensor: turns at 4 of 16")


def test_declines_halves_that_disagree(check: PassCheck) -> None:
    @region("moe", *INPUTS, outputs=OUTPUTS, path="self_attn.indexer")
    def before(query, key, cos, sin):
        c, s = aten.unsqueeze.default(cos, 2), aten.unsqueeze.default(sin, 2)

        def wrong(x):
            lower, upper = aten.slice.Tensor(x, 3, 8, END), aten.slice.Tensor(x, 3, 0, 8)
            turned = aten.cat.default([aten.neg.default(upper), lower], -1)
            return aten.add.Tensor(aten.mul.Tensor(x, c), aten.mul.Tensor(turned, s))

        return wrong(query), wrong(key)

    check.declines(RecognizeRopeHalf(), before)
