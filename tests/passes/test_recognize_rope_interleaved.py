import torch

from dsa_compile.passes.recognize_rope_interleaved import RecognizeRopeInterleaved
from dsa_compile.passes.shared import END
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten, dsa = torch.ops.aten, torch.ops.dsa

INPUTS = (
    value("query", "B", 4, "S", 16),
    value("key", "B", 1, "S", 16),
    value("cos", "B", "S", 16),
    value("sin", "B", "S", 16),
)
OUTPUTS = ("query_out", "key_out")


def table(x, heads=1):
    return aten.unsqueeze.default(aten.slice.Tensor(x, 2, 0, 8), heads)


def rotate(x, c, s, dim=3):
    a, b = aten.slice.Tensor(x, dim, 0, END, 2), aten.slice.Tensor(x, dim, 1, END, 2)
    left = aten.sub.Tensor(aten.mul.Tensor(a, c), aten.mul.Tensor(b, s))
    right = aten.add.Tensor(aten.mul.Tensor(b, c), aten.mul.Tensor(a, s))
    return aten.cat.default([left, right], -1)


def test_queries_and_key_become_one_op_each(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS)
    def before(query, key, cos, sin):
        c, s = table(cos), table(sin)  # one for both
        return rotate(query, c, s), rotate(key, c, s)

    @region("dense", *INPUTS, outputs=OUTPUTS)
    def expected(query, key, cos, sin):
        def op(x):
            turned = aten.transpose.int(x, 1, 2)
            rotated = dsa.rope_interleaved.default(turned, cos, sin)
            return aten.transpose.int(rotated, 1, 2)

        return op(query), op(key)

    check(RecognizeRopeInterleaved(), before, expected, rewrites=2)


def test_an_indexer_with_tokens_first_needs_no_transposes(check: PassCheck) -> None:
    index = (value("index_query", "B", "S", 4, 16), value("index_key", "B", "S", 1, 16))
    names = (*OUTPUTS, "index_query_out", "index_key_out")

    @region("dense", *INPUTS, *index, outputs=names)
    def before(query, key, cos, sin, index_query, index_key):
        attention, indexer = ((table(cos, d), table(sin, d)) for d in (1, 2))
        of_attention = rotate(query, *attention), rotate(key, *attention)
        return *of_attention, rotate(index_query, *indexer), rotate(index_key, *indexer)

    @region("dense", *INPUTS, *index, outputs=names)
    def expected(query, key, cos, sin, index_query, index_key):
        def op(x):
            return dsa.rope_interleaved.default(x, cos, sin)

        turned = (op(aten.transpose.int(x, 1, 2)) for x in (query, key))
        back = (aten.transpose.int(x, 1, 2) for x in turned)
        return *back, op(index_query), op(index_key)

    check(RecognizeRopeInterleaved(), before, expected, rewrites=4, index_rope_interleaved=True)


def test_declines_tables_spread_over_another_dimension(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS, path="self_attn")
    def before(query, key, cos, sin):
        c, s = table(cos), table(sin)
        four = aten.transpose.int(query, 0, 3)  # [16, 4, S, B]
        odd = [aten.unsqueeze.default(aten.slice.Tensor(t, 2, 0, 8), 0) for t in (cos, sin)]
        wide = aten.slice.Tensor(aten.transpose.int(four, 0, 3), 1, 0, 1)
        return rotate(wide, *odd), rotate(key, c, s)

    message = check.declines(RecognizeRopeInterleaved(), before, untouched=False)
    assert "spreads its tables over dimension 0" in message


def test_declines_swapped_tables(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS, path="self_attn")
    def before(query, key, cos, sin):
        c, s = table(sin), table(cos)
        return rotate(query, c, s), rotate(key, c, s)

    assert check.declines(RecognizeRopeInterleaved(), before) == (
        "pass recognize_rope_interleaved: matched 0 of 2 sites in 'dense' (2 layers); "
        "nearest miss: self_attn: node sin: 'cos': is sin, not the input cos"
    )


def test_declines_one_angle_for_all_pairs(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS, path="self_attn")
    def before(query, key, cos, sin):
        c, s = (aten.unsqueeze.default(aten.slice.Tensor(t, 2, 0, 1), 1) for t in (cos, sin))
        return rotate(query, c, s), rotate(key, c, s)

    message = check.declines(RecognizeRopeInterleaved(), before)
    assert message.endswith("node cat_default: rotates by 1 angles, not half of 16")


def test_declines_pairs_along_another_dimension(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS, path="self_attn")
    def before(query, key, cos, sin):
        c, s = table(cos), table(sin)
        wide = aten.slice.Tensor(query, 3, 0, 8)
        return rotate(wide, c, s, dim=1), rotate(key, c, s)

    message = check.declines(RecognizeRopeInterleaved(), before, untouched=False)
    assert "matched 1 of 2 sites" in message
    assert "found 1 where 3 was expected" in message


def test_one_of_two_is_not_enough(check: PassCheck) -> None:
    @region("dense", *INPUTS, outputs=OUTPUTS, path="self_attn")
    def before(query, key, cos, sin):
        c, s = table(cos), table(sin)
        return rotate(query, c, s), rotate(key, s, c)

    message = check.declines(RecognizeRopeInterleaved(), before, untouched=False)
    assert "matched 1 of 2 sites in 'dense' (2 layers)" in message
    assert "is sin, not the input cos" in message
