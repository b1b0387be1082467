"""Which node is which."""

from dsa_compile.inspect.pairing import pair_programs, pair_stages
from tests.inspect.drawn import drawn

BEFORE = """
    x
    w: weight w
    a = aten.mul.Tensor(x, w)
    b = aten.neg.default(a)
    c = aten.add.Tensor(b, x)
    return c
"""


def test_a_graph_is_itself() -> None:
    graph = drawn("g", BEFORE)
    for found in (pair_programs(graph, graph), pair_stages(graph, graph, (), ())):
        assert found.pairs == {name: name for name in graph.nodes}
        assert (found.removed, found.made, found.changes) == ((), (), ())


def test_names_mean_nothing_between_programs() -> None:
    other = drawn("g", """
        w: weight w
        x
        c = aten.mul.Tensor(x, w)
        a = aten.neg.default(c)
        b = aten.add.Tensor(a, x)
        return b
    """)  # fmt: skip
    found = pair_programs(drawn("g", BEFORE), other)
    assert {k: found.pairs[k] for k in "abcx"} == {"a": "c", "b": "a", "c": "b", "x": "x"}
    assert (found.removed, found.made, found.changes) == ((), (), ())


def test_what_comes_behind_a_difference_still_pairs() -> None:
    other = drawn("g", BEFORE.replace("aten.neg.default", "aten.abs.default"))
    found = pair_programs(drawn("g", BEFORE), other)
    assert (found.removed, found.made) == (("b",), ("b",))
    (change,) = found.changes
    assert (change.after, change.rewired, change.constants) == ("c", (("b", "b"),), False)


def test_other_constants_are_a_change_where_the_pass_made_nothing() -> None:
    before = drawn("g", "x\n a = aten.add.Tensor(x, 1)\n return a")
    after = drawn("g", "x\n a = aten.add.Tensor(x, 2)\n return a")
    (change,) = pair_stages(before, after, (), ()).changes
    assert (change.constants, change.rewired) == (True, ())
    # between programs the two additions are not known to be one
    assert pair_programs(before, after).made == ("a",)


def test_a_name_taken_again_is_another_node() -> None:
    before = drawn("g", BEFORE)
    after = drawn("g", BEFORE.replace("mul.Tensor(x, w)", "mul.Tensor(x, x)"))
    kept = pair_stages(before, after, (), ())
    assert (kept.made, [change.after for change in kept.changes]) == ((), ["a"])
    replaced = pair_stages(before, after, {"a"}, {"a"})
    assert (replaced.removed, replaced.made) == (("a",), ("a",))


def test_a_missing_side() -> None:
    graph = drawn("g", BEFORE)
    assert pair_stages(None, graph, (), ()).made == tuple(graph.nodes)
    assert pair_programs(graph, None).removed == tuple(graph.nodes)


def test_swapped_entries_are_rewired_not_replaced() -> None:
    text = """
        x
        c = dsa.add_rms_norm.default(x)
        n = operator.getitem(c, {0})
        r = operator.getitem(c, {1})
        y = dsa.linear.default(n)
        z = aten.add.Tensor(r, y)
        return z
    """
    right, wrong = (drawn("g", text.format(*order)) for order in ((0, 1), (1, 0)))
    found = pair_programs(right, wrong)
    assert (found.removed, found.made) == ((), ())
    assert {c.after: c.rewired for c in found.changes} == {"y": (("n", "n"),), "z": (("r", "r"),)}
