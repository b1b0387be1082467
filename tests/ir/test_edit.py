"""The editor: typed insertion, provenance, and what counts as a rewrite."""

import operator

import pytest
import torch

from dsa_compile.errors import CompileError
from dsa_compile.ir.dims import FakeWorld, shape_names
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import calls
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.site import NearMiss
from dsa_compile.ir.tensor_info import describe
from tests.passes.sketch import batch, cache, canonical, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

X = value("x", "T", 8)


def editing(source) -> tuple[Editor, Region]:
    world = FakeWorld()
    made = source.trace(world)
    return Editor(made, world, "tester"), made


def node_of(made: Region, target):
    (found,) = calls(made.graph, target)
    return found


@region("dense", X, path="mlp")
def negated(x):
    return aten.neg.default(x)


def test_a_new_call_is_typed_and_says_where_it_comes_from() -> None:
    edit, made = editing(negated)
    old = node_of(made, aten.neg.default)
    new = edit.call(aten.cat.default, [old.args[0], old.args[0]], -1, before=old)
    assert repr(describe(new.meta["val"])) == "float32[T, 16]"
    assert (new.meta["path"], new.meta["origin"]) == ("mlp", "tester")
    assert new < old
    assert edit.rewrites == 0


def test_a_call_that_cannot_be_leaves_an_error_at_once() -> None:
    edit, made = editing(negated)
    old = node_of(made, aten.neg.default)
    with pytest.raises(CompileError) as error:
        edit.call(aten.view.default, old.args[0], [3, 5], before=old)
    assert str(error.value).startswith(
        "pass tester: mlp: aten.view.default of x is float32[T, 8] fails: "
    )
    assert edit.result("logits") is old


def test_an_op_that_does_not_take_an_operand_names_it_and_who_made_it() -> None:
    edit, made = editing(negated)
    old = node_of(made, aten.neg.default)
    edit.replace(old, edit.call(aten.cos.default, old.args[0], before=old))
    wide = edit.call(aten.cat.default, [old.args[0], old.args[0]], -1, before=old, name="wide")
    weight_ = edit.input(Role.WEIGHT, "norm", (9,), torch.float32)
    with pytest.raises(CompileError) as error:
        edit.call(dsa.rms_norm.default, wide, weight_, 1e-6, before=old)
    assert str(error.value) == (
        "pass tester: mlp: dsa::rms_norm takes weight as floating[D] with D = 16 as in x, not "
        "float32[9]; norm is float32[9]; wide is float32[T, 16], made by tester site 2"
    )


def test_replace_counts_and_swap_does_not() -> None:
    for method, count in (("replace", 1), ("swap", 0)):
        edit, made = editing(negated)
        old = node_of(made, aten.neg.default)
        getattr(edit, method)(old, edit.call(aten.cos.default, old.args[0], before=old))
        assert edit.rewrites == count
        edit.sweep()
        assert [n.target for n in made.graph.nodes if n.op == "call_function"] == [aten.cos.default]


@pytest.mark.parametrize(
    ("target", "args", "type_"),
    [
        (aten.to.dtype, (torch.bfloat16,), "bfloat16[T, 8]"),
        (aten.unsqueeze.default, (0,), "float32[1, T, 8]"),
        (aten.split_with_sizes.default, ([4, 4], -1), "(float32[T, 4], float32[T, 4])"),
    ],
)
def test_another_type_is_refused(target, args, type_: str) -> None:
    edit, made = editing(negated)
    old = node_of(made, aten.neg.default)
    new = edit.call(target, old.args[0], *args, before=old)
    with pytest.raises(CompileError) as error:
        edit.replace(old, new)
    assert str(error.value) == (
        f"pass tester: mlp: neg_default is float32[T, 8]; its replacement {new.name} is {type_}, "
        "made by tester site 1"
    )


def test_take_puts_one_of_several_results_in_place() -> None:
    edit, made = editing(negated)
    old = node_of(made, aten.neg.default)
    pieces = edit.call(aten.split_with_sizes.default, old.args[0], [8], -1, before=old)
    edit.take(pieces, 0, old, "piece")
    edit.sweep()
    (result,) = made.graph.output_node().args[0]
    assert (result.name, result.target, result.args) == ("piece", operator.getitem, (pieces, 0))
    assert edit.rewrites == 0


def test_reroute_types_everything_behind_again() -> None:
    @region("head", X, weight("w", 4, 8))
    def source(x, w):
        return aten.neg.default(dsa.linear.default(x, w))

    edit, made = editing(source)
    x = made.inputs_of(Role.VALUE)[0]
    rows = edit.input(Role.BATCH, "rows", ("N",), torch.int64)
    picked = edit.call(aten.index_select.default, x, 0, rows, before=rows.next)
    edit.reroute(x, picked)
    assert shape_names(node_of(made, aten.neg.default).meta["val"]) == ("N", "4")
    assert picked.args[0] is x
    assert edit.rewrites == 1


def test_duplicates_merge_to_the_first() -> None:
    @region("dense", X, outputs=("a", "b", "c"))
    def source(x):
        pairs = [aten.split_with_sizes.default(x, [5, 3], -1) for _ in range(2)]
        other = aten.split_with_sizes.default(x, [3, 5], -1)
        return pairs[0][0], pairs[1][0], other[0]

    @region("dense", X, outputs=("a", "b", "c"))
    def expected(x):
        first = aten.split_with_sizes.default(x, [5, 3], -1)[0]
        return first, first, aten.split_with_sizes.default(x, [3, 5], -1)[0]

    edit, made = editing(source)
    edit.merge_duplicates()
    assert canonical(made) == canonical(expected.trace(edit.world))


def test_keywords_keep_calls_apart() -> None:
    @region("dense", X, outputs=("a", "b"))
    def source(x):
        return aten.add.Tensor(x, x), aten.add.Tensor(x, x, alpha=2)

    edit, made = editing(source)
    edit.merge_duplicates()
    assert made.node_count() == 2


def test_writes_are_never_merged_nor_swept() -> None:
    keys, slots = value("k", "T", 8), batch("slot_mapping", "T")

    @region("dense", keys, slots, cache("index_cache", "P", 16, 8))
    def source(k, slots, index):
        dsa.write_index_cache.default(k, index, slots)
        dsa.write_index_cache.default(k, index, slots)
        return aten.neg.default(k)

    edit, made = editing(source)
    edit.merge_duplicates()
    edit.sweep()
    assert len(list(calls(made.graph, dsa.write_index_cache.default))) == 2


def test_sweep_drops_dead_calls_and_inputs() -> None:
    @region("dense", X, value("unused", "T", 8), weight("w", 4, 8))
    def source(x, unused, w):
        dsa.linear.default(unused, w)
        return aten.neg.default(x)

    edit, made = editing(source)
    edit.sweep()
    assert [node.meta["key"] for node in made.inputs()] == ["x"]
    assert made.node_count() == 1


def test_an_input_is_made_once() -> None:
    edit, made = editing(negated)
    first = edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64)
    assert edit.input(Role.BATCH, "slot_mapping", ("T",), torch.int64) is first
    assert (first.meta["origin"], repr(describe(first.meta["val"]))) == ("tester", "int64[T]")
    # the same key in another role is another input
    assert edit.input(Role.VALUE, "slot_mapping", ("T",), torch.int64) is not first
    made.graph.lint()


def test_notes_remember_their_region() -> None:
    edit, _ = editing(negated)
    edit.note([NearMiss("mlp", "neg", "why", 3)])
    assert [(miss.region, miss.depth) for miss in edit.misses] == [("dense", 3)]
