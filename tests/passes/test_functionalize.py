import pytest
import torch

from dsa_compile.passes.functionalize import Functionalize
from dsa_compile.passes.shared import END
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten = torch.ops.aten

NOPE, ROT = value("nope", 2, 12, 5), value("rot", 2, 12, 3)
X, TOTAL = value("x", 2, 12, 8), value("total", 2, 12, 1)


def test_a_filled_buffer_is_a_concatenation(check: PassCheck) -> None:
    @region("dense", NOPE, ROT)
    def before(nope, rot):
        buffer = aten.new_empty.default(nope, [2, 12, 8])
        aten.copy_.default(aten.slice.Tensor(buffer, -1, 0, 5), nope)
        aten.copy_.default(aten.slice.Tensor(buffer, 2, 5, END), rot)
        return aten.neg.default(buffer)

    @region("dense", NOPE, ROT)
    def expected(nope, rot):
        return aten.neg.default(aten.cat.default([nope, rot], -1))

    check(Functionalize(), before, expected)


def test_the_order_of_writing_does_not_matter(check: PassCheck) -> None:
    @region("dense", NOPE, ROT)
    def before(nope, rot):
        buffer = aten.new_empty.default(nope, [2, 12, 8])
        aten.copy_.default(aten.slice.Tensor(buffer, -1, 5, 8), rot)
        aten.copy_.default(aten.slice.Tensor(buffer, -1, 0, 5), nope)
        return buffer

    @region("dense", NOPE, ROT)
    def expected(nope, rot):
        return aten.cat.default([nope, rot], -1)

    check(Functionalize(), before, expected)


def test_later_readers_see_the_written_value_and_earlier_ones_the_old(check: PassCheck) -> None:
    outputs = ("early", "late", "again")

    @region("dense", X, TOTAL, outputs=outputs)
    def before(x, total):
        scores = aten.sigmoid.default(x)
        early = aten.neg.default(scores)
        written = aten.div_.Tensor(scores, total)
        return early, written, aten.neg.default(scores)

    @region("dense", X, TOTAL, outputs=outputs)
    def expected(x, total):
        scores = aten.sigmoid.default(x)
        written = aten.div.Tensor(scores, total)
        return aten.neg.default(scores), written, aten.neg.default(written)

    check(Functionalize(), before, expected)


def test_scatter_and_index_put(check: PassCheck) -> None:
    index = value("index", 2, 12, 8, dtype=torch.int64)

    @region("moe", X, index)
    def before(x, index):
        zeros = aten.zeros_like.default(x)
        return aten.neg.default(aten.scatter_.value(zeros, 2, index, 1.0))

    @region("moe", X, index)
    def expected(x, index):
        zeros = aten.zeros_like.default(x)
        return aten.neg.default(aten.scatter.value(zeros, 2, index, 1.0))

    order = torch.arange(8).expand(2, 12, 8)
    check(Functionalize(), before, expected, inputs={"index": order})


@pytest.mark.parametrize(
    ("start", "end", "covered"), [(5, 7, "[(0, 5), (5, 7)]"), (4, END, "[(0, 5), (4, 8)]")]
)
def test_declines_a_buffer_not_written_exactly_once(
    check: PassCheck, start: int, end: int, covered: str
) -> None:
    @region("dense", X, path="self_attn")
    def before(x):
        buffer = aten.new_empty.default(x, [2, 12, 8])
        aten.copy_.default(aten.slice.Tensor(buffer, 2, 0, 5), aten.slice.Tensor(x, 2, 0, 5))
        aten.copy_.default(
            aten.slice.Tensor(buffer, 2, start, end), aten.slice.Tensor(x, 2, start, end)
        )
        return aten.neg.default(buffer)

    assert check.declines(Functionalize(), before) == (
        "pass functionalize: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        f"self_attn: node new_empty_default: writes cover {covered} of a buffer 8 wide"
    )


def test_declines_a_buffer_read_before_it_is_full(check: PassCheck) -> None:
    @region("dense", NOPE, ROT, outputs=("early", "late"), path="self_attn")
    def before(nope, rot):
        buffer = aten.new_empty.default(nope, [2, 12, 8])
        aten.copy_.default(aten.slice.Tensor(buffer, 2, 0, 5), nope)
        early = aten.neg.default(buffer)
        aten.copy_.default(aten.slice.Tensor(buffer, 2, 5, END), rot)
        return early, aten.neg.default(buffer)

    message = check.declines(Functionalize(), before)
    assert "self_attn: node new_empty_default: is read by neg_default before" in message


def test_declines_a_buffer_written_by_another_operator(check: PassCheck) -> None:
    @region("dense", NOPE, ROT, path="self_attn")
    def before(nope, rot):
        buffer = aten.new_empty.default(nope, [2, 12, 8])
        aten.copy_.default(aten.slice.Tensor(buffer, 2, 0, 5), nope)
        aten.fill_.Scalar(aten.slice.Tensor(buffer, 2, 5, END), 0.0)
        return aten.neg.default(buffer)

    message = check.declines(Functionalize(), before)
    assert "writes cover [(0, 5)] of a buffer 8 wide" in message


def test_declines_an_unknown_mutation(check: PassCheck) -> None:
    @region("dense", X, path="mlp")
    def before(x):
        return aten.mul_.Tensor(aten.neg.default(x), 2.0)

    message = check.declines(Functionalize(), before)
    assert message.endswith("nearest miss: mlp: node mul__tensor: writes in place")


def test_declines_to_write_through_a_view(check: PassCheck) -> None:
    @region("dense", X, TOTAL, outputs=("base", "written"), path="mlp")
    def before(x, total):
        base = aten.neg.default(x)
        written = aten.div_.Tensor(aten.slice.Tensor(base, 1, 0, 12), total)
        return base, written

    message = check.declines(Functionalize(), before)
    assert message.endswith("node div__tensor: writes in place, and slice_tensor is a view")


def test_declines_to_write_what_a_view_reads_later(check: PassCheck) -> None:
    @region("dense", X, TOTAL, outputs=("view", "written"), path="mlp")
    def before(x, total):
        base = aten.neg.default(x)
        view = aten.slice.Tensor(base, 1, 0, 3)
        written = aten.div_.Tensor(base, total)
        return aten.neg.default(view), written

    message = check.declines(Functionalize(), before)
    assert message.endswith("node div__tensor: writes in place, and slice_tensor is a view")
