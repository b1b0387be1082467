"""Pass machinery around every pass."""

from typing import Any

import pytest
import torch

from dsa_compile.errors import CompileError
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import Call, Node, calls
from dsa_compile.ir.passes import NEAR_MISSES_KEPT, Numerics, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region
from dsa_compile.ir.site import NearMiss
from tests.passes.sketch import fragment, region, value, weight

aten = torch.ops.aten

X = value("x", "T", 8)


class CosToSin(RegionPass):
    """Mathematics it is not."""

    numerics = Numerics.TOLERANCE

    def __init__(self, promised: int | None = None) -> None:
        self.promised = promised

    def expects(self, program: Program, region: Region) -> int | None:
        return self.promised if region.kind != "head" else None

    def rewrite(self, edit: Editor, program: Program) -> None:
        for m in edit.matches(Call(aten.cos.default, Call(aten.neg.default, Node("x")))):
            edit.replace(m.root, edit.call(aten.sin.default, m["x"], before=m.root))


@region("dense", X, outputs=("a",), path="mlp")
def dense(x):
    return aten.cos.default(aten.neg.default(x))


@region("moe", value("y", "T", 8), outputs=("b",), path="experts")
def moe(y):
    return aten.cos.default(aten.neg.default(aten.cos.default(aten.neg.default(y))))


def test_the_name_is_the_class_in_snake_case() -> None:
    assert CosToSin().name == "cos_to_sin"


def test_rewrites_are_counted_by_graph_and_weighted_by_layers() -> None:
    made = fragment(dense, moe)  # two layers of each
    record = CosToSin(1)(made)
    assert record.by_region == {"dense": 1, "moe": 2}
    assert (record.rewrites, record.expected) == (2 * 1 + 2 * 2, 2 * 1 + 2 * 1)
    assert record.numerics is Numerics.TOLERANCE
    assert made.records == [record]
    assert record.seconds > 0


def test_dead_code_goes_and_nodes_are_counted_as_a_step_runs_them() -> None:
    record = CosToSin()(fragment(dense))
    assert (record.nodes_before, record.nodes_after) == (2 * 2, 2 * 1)
    assert record.expected is None


def test_before_and_after_are_kept_for_changed_regions_only() -> None:
    @region("moe", value("y", "T", 8), outputs=("b",))
    def other(y):
        return aten.neg.default(y)

    record = CosToSin()(fragment(dense, other))
    assert list(record.before) == list(record.after) == ["dense"]
    assert "ops.aten.cos(" in record.before["dense"]
    assert "ops.aten.sin(" in record.after["dense"]


def test_a_broken_promise_names_pass_region_layers_and_the_nearest_miss() -> None:
    @region("dense", X, outputs=("a",), path="mlp.act")
    def broken(x):
        return aten.cos.default(aten.abs.default(x))

    with pytest.raises(CompileError) as error:
        CosToSin(1)(fragment(broken, moe))
    assert str(error.value) == (
        "pass cos_to_sin: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: mlp.act: "
        "node abs_default: calls aten.abs.default where aten.neg.default was expected"
    )


def test_a_rewrite_of_which_nothing_is_read_is_refused() -> None:
    class Forgets(RegionPass):
        def rewrite(self, edit: Editor, program: Program) -> None:
            for m in edit.matches(Call(aten.neg.default, Node("x"))):
                edit.call(aten.abs.default, m["x"], before=m.root)
                edit.close_site()

    with pytest.raises(CompileError) as error:
        Forgets()(fragment(dense, moe))
    assert str(error.value).startswith("pass forgets: ")
    assert str(error.value).endswith("nothing reads what site 1 makes: abs_1")


def test_a_rewrite_of_what_was_never_read_is_none_to_refuse() -> None:
    """Models have such calls: the experts of one version of transformers clamp in vain."""

    class NegToAbs(RegionPass):
        def rewrite(self, edit: Editor, program: Program) -> None:
            for m in edit.matches(Call(aten.neg.default, Node("x"))):
                edit.replace(m.root, edit.call(aten.abs.default, m["x"], before=m.root))

    @region("dense", X, outputs=("a",), path="mlp")
    def in_vain(x):
        aten.neg.default(x)
        return aten.cos.default(x)

    assert "dense" in NegToAbs()(fragment(in_vain, moe)).by_region


def test_a_broken_promise_names_who_rewrote_there_last() -> None:
    class NegToAbs(RegionPass):
        def rewrite(self, edit: Editor, program: Program) -> None:
            for m in edit.matches(Call(aten.neg.default, Node("x"))):
                edit.replace(m.root, edit.call(aten.abs.default, m["x"], before=m.root))

    made = fragment(dense, moe)
    NegToAbs()(made)
    with pytest.raises(CompileError) as error:
        CosToSin(1)(made)
    assert str(error.value).endswith(
        "calls aten.abs.default where aten.neg.default was expected; "
        "rewritten there last by neg_to_abs (site 1)"
    )


def test_a_broken_promise_names_who_made_the_node_before_who_rewrote_there_last() -> None:
    """The last rewrite of the same module may have nothing to do with it."""

    def into(old: Any, new: Any) -> RegionPass:
        class Into(RegionPass):
            name = f"{old}_to_{new}"

            def rewrite(self, edit: Editor, program: Program) -> None:
                for m in edit.matches(Call(getattr(aten, old).default, Node("x"))):
                    call = edit.call(getattr(aten, new).default, m["x"], before=m.root)
                    edit.replace(m.root, call)

        return Into()

    @region("dense", X, outputs=("a", "b"), path="mlp")
    def two(x):
        return aten.cos.default(aten.neg.default(x)), aten.sin.default(x)

    made = fragment(two, moe)
    into("neg", "abs")(made)
    into("sin", "tan")(made)
    with pytest.raises(CompileError) as error:
        CosToSin(1)(made)
    assert str(error.value).endswith(
        "; it was made by neg_to_abs site 1; rewritten there last by sin_to_tan (site 1)"
    )


def test_a_broken_promise_names_the_weights_that_are_read_there() -> None:
    """Through two nodes at most, and of the nearest."""

    class NegToAbs(RegionPass):
        def rewrite(self, edit: Editor, program: Program) -> None:
            for m in edit.matches(Call(aten.neg.default, Node("x"))):
                edit.replace(m.root, edit.call(aten.abs.default, m["x"], before=m.root))

    @region("dense", X, weight("near", 8), weight("far", 8), outputs=("a",), path="mlp")
    def weighted(x, near, far):
        scaled = aten.mul.Tensor(aten.mul.Tensor(x, far), near)
        return aten.cos.default(aten.neg.default(aten.sin.default(scaled)))

    made = fragment(weighted, moe)
    NegToAbs()(made)
    with pytest.raises(CompileError, match=r"neg_to_abs \(site 1\); it reads weight near$"):
        CosToSin(1)(made)


def test_a_miss_where_nothing_was_rewritten_blames_nobody() -> None:
    @region("dense", X, outputs=("a",), path="mlp")
    def broken(x):
        return aten.tan.default(x)

    with pytest.raises(CompileError, match=r"nothing came near$"):
        CosToSin(1)(fragment(broken, moe))


def test_the_nearest_miss_is_one_of_the_broken_region() -> None:
    """Deeper failures elsewhere, and many of them, must not hide the one that matters."""

    class Deep(CosToSin):
        def rewrite(self, edit: Editor, program: Program) -> None:
            depth = 1 if edit.region.kind == "dense" else 9
            edit.note([NearMiss("", f"{edit.region.kind}_{i}", "why", depth) for i in range(9)])
            edit.rewrites = int(edit.region.kind != "dense")

    with pytest.raises(CompileError, match="nearest miss: node dense_0: why"):
        Deep(1)(fragment(dense, moe))


def test_records_keep_a_few_misses_of_each_region_deepest_first() -> None:
    class Noisy(CosToSin):
        def rewrite(self, edit: Editor, program: Program) -> None:
            edit.note([NearMiss("", f"n{i}", "why", i) for i in range(20)])

    misses = Noisy()(fragment(dense)).near_misses
    assert len(misses) == 2 * NEAR_MISSES_KEPT  # the head is a region too
    assert [miss.depth for miss in misses] == sorted((m.depth for m in misses), reverse=True)
    assert misses[0].depth == 19


def test_more_sites_than_promised_are_welcome() -> None:
    assert CosToSin(1)(fragment(moe)).rewrites == 4


def test_values_that_no_region_reads_are_dropped_from_results() -> None:
    @region("dense", X, outputs=("read", "unread"))
    def makes(x):
        return aten.cos.default(aten.neg.default(x)), aten.tan.default(x)

    @region("head", value("read", "T", 8))
    def reads(read):
        return aten.neg.default(read)

    made = fragment(makes, reads)
    CosToSin()(made)
    assert made.regions["dense"].outputs == ("read",)
    assert not list(calls(made.regions["dense"].graph, aten.tan.default))


def test_a_pass_without_rewrites_records_nothing_changed() -> None:
    @region("dense", X, outputs=("a",))
    def other(x):
        return aten.neg.default(x)

    record = CosToSin()(fragment(other))
    assert (record.rewrites, record.before, record.after) == (0, {}, {})
