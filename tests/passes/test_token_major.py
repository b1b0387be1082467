from collections.abc import Callable

import torch

from dsa_compile.passes.token_major import TokenMajor
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value

aten, dsa = torch.ops.aten, torch.ops.dsa


def turn(x):
    return aten.transpose.int(x, 1, 2)


def test_two_turns_cancel(check: PassCheck) -> None:
    x = value("x", "B", "S", 4, 8)

    @region("dense", x)
    def before(x):
        return aten.neg.default(turn(turn(x)))

    @region("dense", x)
    def expected(x):
        return aten.neg.default(x)

    check(TokenMajor(), before, expected)


def test_turns_rise_through_concatenation_split_and_expansion(check: PassCheck) -> None:
    inputs = (value("heads", "B", "S", 4, 8), value("shared", "B", "S", 1, 3))

    @region("dense", *inputs)
    def before(heads, shared):
        pieces = aten.split_with_sizes.default(turn(heads), [5, 3], -1)
        key = aten.cat.default([pieces[0], aten.expand.default(turn(shared), [-1, 4, -1, -1])], -1)
        return aten.neg.default(turn(key)), aten.neg.default(turn(pieces[1]))

    @region("dense", *inputs)
    def expected(heads, shared):
        pieces = aten.split_with_sizes.default(heads, [5, 3], -1)
        key = aten.cat.default([pieces[0], aten.expand.default(shared, [-1, -1, 4, -1])], -1)
        return aten.neg.default(key), aten.neg.default(pieces[1])

    outputs = ("key", "rest")
    before = region("dense", *inputs, outputs=outputs)(before.function)
    expected = region("dense", *inputs, outputs=outputs)(expected.function)
    # concatenation, expansion, two results of the split, and the three pairs that then cancel
    check(TokenMajor(), before, expected, rewrites=7)


def test_a_view_with_one_head_is_made_token_major(check: PassCheck) -> None:
    x = value("x", "B", "S", 8)

    @region("dense", x)
    def before(x):
        batch, length = aten.sym_size.int(x, 0), aten.sym_size.int(x, 1)
        return aten.neg.default(turn(aten.view.default(x, [batch, 1, length, 8])))

    @region("dense", x)
    def expected(x):
        batch, length = aten.sym_size.int(x, 0), aten.sym_size.int(x, 1)
        return aten.neg.default(aten.view.default(x, [batch, length, 1, 8]))

    check(TokenMajor(), before, expected)


def test_copies_and_reshapes_to_the_same_shape_go(check: PassCheck) -> None:
    x = value("x", "B", 4, "S", 8)

    @region("dense", x)
    def before(x):
        batch, length = aten.sym_size.int(x, 0), aten.sym_size.int(x, 2)
        same = aten.reshape.default(x, [batch, -1, length, 8])
        return aten.neg.default(aten.contiguous.default(same))

    @region("dense", x)
    def expected(x):
        return aten.neg.default(x)

    check(TokenMajor(), before, expected, rewrites=2)


def test_results_of_one_split_share_it_again(check: PassCheck) -> None:
    x, outputs = value("x", "B", "S", 4, 8), ("a", "b")

    @region("dense", x, outputs=outputs)
    def before(x):
        pieces = aten.split_with_sizes.default(turn(x), [4, 4], -1)
        return turn(pieces[0]), turn(pieces[1])

    @region("dense", x, outputs=outputs)
    def expected(x):
        pieces = aten.split_with_sizes.default(x, [4, 4], -1)
        return pieces[0], pieces[1]

    check(TokenMajor(), before, expected, rewrites=4)


def test_leaves_turns_it_has_no_rule_for(leaves_alone: Callable[..., None]) -> None:
    @region("dense", value("x", "B", "S", 4, 8), value("y", "B", 4, 2, 8), outputs=("a", "b", "c"))
    def before(x, y):
        other_dimensions = aten.transpose.int(x, 2, 3)
        over_arithmetic = turn(aten.neg.default(x))
        several_heads = turn(aten.view.default(y, [-1, 4, 4, 4]))
        return other_dimensions, over_arithmetic, several_heads

    leaves_alone(TokenMajor(), before)


def test_leaves_a_concatenation_along_the_turned_dimensions(
    leaves_alone: Callable[..., None],
) -> None:
    @region("dense", value("x", "B", "S", 4, 8))
    def before(x):
        return turn(aten.cat.default([x, x], 2))

    leaves_alone(TokenMajor(), before)


def test_leaves_a_split_along_the_turned_dimensions(leaves_alone: Callable[..., None]) -> None:
    @region("dense", value("x", "B", "S", 4, 8))
    def before(x):
        return turn(aten.split_with_sizes.default(x, [2, 2], 2)[0])

    leaves_alone(TokenMajor(), before)
