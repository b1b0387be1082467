"""Every way a program can break the form of its level."""

import pytest
import torch

from dsa_compile.errors import CompileError
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import calls
from dsa_compile.ir.program import Level
from dsa_compile.ir.region import Role
from dsa_compile.ir.spec import verify, violations
from dsa_compile.weights.plan import Load, WeightEntry
from tests.passes.sketch import Fragment, Sketch, batch, cache, fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HIDDEN = value("hidden", "T", 8)


@region("embed", batch("ids", "T"), weight("table", 4, 8), outputs=("hidden",))
def embed(ids, table):
    return dsa.embedding.default(ids, table)


@region("head", HIDDEN, weight("w", 4, 8))
def head(hidden, w):
    return dsa.linear.default(hidden, w)


def layer(*inputs, path: str = "mlp"):
    return region("dense", *inputs, outputs=("hidden",), path=path)


def program(middle: Sketch) -> Fragment:
    return fragment(embed, middle, head)


def problems(middle: Sketch, level: Level = Level.KERNEL) -> list[str]:
    return list(violations(program(middle), level))


@layer(HIDDEN)
def fine(hidden):
    return aten.neg.default(hidden)


@pytest.mark.parametrize("level", Level)
def test_a_legal_program_has_no_problem(level: Level) -> None:
    assert problems(fine, level) == []
    verify(program(fine), level)


def test_the_first_problem_is_raised_with_module_and_node() -> None:
    @layer(HIDDEN)
    def odd(hidden):
        return aten.erf.default(hidden)

    with pytest.raises(CompileError) as error:
        verify(program(odd), Level.LOGICAL)
    assert str(error.value) == (
        "not a legal LOGICAL program: dense: mlp: node erf_default calls aten.erf.default"
    )
    assert problems(odd, Level.EXPORTED) == []  # whatever export gives


def test_kernel_ops_are_not_logical() -> None:
    @layer(HIDDEN, weight("norm", 8))
    def kernel(hidden, norm):
        return dsa.add_rms_norm.default(hidden, hidden, norm, 1e-6)[0]

    assert problems(kernel, Level.LOGICAL) == [
        "dense: mlp: node add_rms_norm_default calls dsa.add_rms_norm.default"
    ]
    assert problems(kernel, Level.KERNEL) == []


def test_dense_ops_and_symbolic_sizes_are_not_kernel() -> None:
    rows = value("hidden", "B", "S", 8)

    @region("embed", batch("ids", "B", "S"), weight("table", 4, 8), outputs=("hidden",))
    def embed(ids, table):
        return dsa.embedding.default(ids, table)

    @layer(rows)
    def dense(hidden):
        length = aten.sym_size.int(hidden, 1)
        return aten.view.default(hidden, [-1, length, 8])

    @region("head", rows)
    def head(hidden):
        return aten.neg.default(hidden)

    made = fragment(embed, dense, head)
    assert list(violations(made, Level.LOGICAL)) == []
    assert "dense: mlp: node sym_size_int calls aten.sym_size.int" in list(
        violations(made, Level.KERNEL)
    )


def test_caches_are_not_logical() -> None:
    @layer(HIDDEN, cache("index_cache", "P", 16, 8))
    def cached(hidden, index):
        return aten.add.Tensor(hidden, aten.select.int(aten.select.int(index, 0, 0), 0, 0))

    assert problems(cached, Level.LOGICAL) == ["dense: top: node index_cache has role cache"]
    assert problems(cached, Level.KERNEL) == []


def test_no_value_is_quadratic_in_tokens() -> None:
    @layer(value("hidden", "T", 1))
    def pairs(hidden):
        return aten.add.Tensor(hidden, aten.transpose.int(hidden, 0, 1))

    found = list(violations(fragment(embed_of(1), pairs), Level.KERNEL))
    assert found == ["dense: mlp: node add_tensor is quadratic in tokens: float32[T, T]"]


def embed_of(width: int) -> Sketch:
    return region("embed", batch("ids", "T"), weight("table", 4, width), outputs=("hidden",))(
        embed.function
    )


def test_a_matrix_over_the_sequence_is_not_logical() -> None:
    @region("dense", value("hidden", "B", "S", 1), outputs=("hidden",), path="self_attn")
    def pairs(hidden):
        return aten.add.Tensor(hidden, aten.transpose.int(hidden, 1, 2))

    found = list(violations(fragment(pairs), Level.LOGICAL))
    assert "dense: self_attn: node add_tensor is quadratic in tokens: float32[B, S, S]" in found


def test_a_call_is_checked_again_with_the_types_that_its_operands_have_now() -> None:
    @layer(HIDDEN, weight("norm.weight", 8))
    def normed(hidden, norm):
        return dsa.rms_norm.default(hidden, norm, 1e-6)

    made = program(normed)
    region_ = made.regions["dense"]
    edit = Editor(region_, made.world, "narrow_norms")
    (norm,) = region_.inputs_of(Role.WEIGHT)
    edit.retype(norm, (6,), torch.float32)
    assert next(violations(made, Level.KERNEL)) == (
        "dense: mlp: node rms_norm_default cannot be: dsa::rms_norm takes weight as floating[D] "
        "with D = 8 as in x, not float32[6]; norm_weight is float32[6]; hidden is float32[T, 8]"
    )


def test_a_call_is_marked_with_what_it_returns() -> None:
    @layer(HIDDEN, weight("norm.weight", 8))
    def normed(hidden, norm):
        return dsa.rms_norm.default(hidden, norm, 1e-6)

    made = program(normed)
    region_ = made.regions["dense"]
    (old,) = calls(region_.graph, dsa.rms_norm.default)
    edit = Editor(region_, made.world, "fuse_it")
    new = edit.call(dsa.rms_norm.default, *old.args, before=old, name="fused")
    edit.replace(old, new)
    edit.sweep()
    edit.retype(new, ("T", 8), torch.float16)
    found = list(violations(made, Level.KERNEL))
    assert found[0] == (
        "dense: mlp: node fused is marked as float16[T, 8] but returns float32[T, 8], made by "
        "fuse_it site 1"
    )


def test_no_size_depends_on_data() -> None:
    made = program(fine)
    (node,) = (n for n in made.regions["dense"].graph.nodes if n.op == "call_function")
    with made.world.mode:
        unknown = made.world.mode.shape_env.create_unbacked_symint()
        node.meta["val"] = torch.empty((unknown, 8))
    (problem,) = violations(made, Level.KERNEL)
    assert problem.startswith("dense: mlp: node neg_default has a size that depends on data: ")


def test_a_value_nobody_made() -> None:
    @layer(HIDDEN, value("ghost", "T", 8))
    def reads(hidden, ghost):
        return aten.add.Tensor(hidden, ghost)

    assert problems(reads) == ["dense: reads ghost, which nothing has made"]


def test_a_value_must_come_from_an_earlier_region_in_every_variant() -> None:
    @layer(HIDDEN, value("rows", "T", 8))
    def reads(hidden, rows):
        return aten.add.Tensor(hidden, rows)

    makes = region("embed", *embed.inputs, outputs=("hidden", "rows"))(
        lambda ids, table: (embed.function(ids, table),) * 2
    )
    made = fragment(makes, reads, head)
    assert list(violations(made, Level.KERNEL)) == []
    full = made.regions.pop("embed")
    made.regions["embed.long"] = full
    made.regions["embed.short"] = embed.trace(made.world)
    made.regions["embed.short"].name = "embed.short"
    assert list(violations(made, Level.KERNEL)) == ["dense: reads rows, which nothing has made"]


def test_a_weight_that_is_not_planned() -> None:
    made = program(fine)
    made.weights.remove("head", "w")
    assert list(violations(made, Level.KERNEL)) == ["head: weight w is not in the weight plan"]


def test_a_weight_planned_with_another_type() -> None:
    made = program(fine)
    made.weights.remove("head", "w")
    made.weights.define("head", "w", WeightEntry("bfloat16", (4, 8), Load("lm_head.weight")))
    (problem,) = violations(made, Level.KERNEL)
    assert problem.startswith("head: weight w is float32[4, 8] but planned as ")


@pytest.mark.parametrize("role", [None, "weights"])
def test_an_input_without_a_role(role: str | None) -> None:
    made = program(fine)
    (node,) = made.regions["dense"].inputs_of(Role.VALUE)
    node.meta["role"] = role
    assert f"dense: top: node hidden has role {role}" in list(violations(made, Level.KERNEL))


def test_other_kinds_of_node() -> None:
    made = program(fine)
    graph = made.regions["dense"].graph
    with graph.inserting_before(graph.output_node()):
        node = graph.call_method("neg", (made.regions["dense"].inputs()[0],))
    node.meta.update(path="mlp", val=made.regions["dense"].inputs()[0].meta["val"])
    assert list(violations(made, Level.KERNEL)) == ["dense: mlp: node neg is a call_method"]


def test_a_hazard_between_streams() -> None:
    """The calls after ``on_stream`` never join stream 0."""
    made = program(fine)
    graph = made.regions["dense"].graph
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "call_function")):
        node = graph.create_node("call_function", dsa.on_stream.default, (1,))
        node.meta |= {"val": None, "path": ""}
    with pytest.raises(CompileError, match="not a legal KERNEL program: dense: not joined: "):
        verify(made, Level.KERNEL)
