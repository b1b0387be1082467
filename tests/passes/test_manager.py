"""Which selections of passes are taken, and what a run of the pipeline does."""

import importlib
from pathlib import Path

import pytest

from dsa_compile.errors import CompileError, UserError
from dsa_compile.facts.config import TARGETS, CompileConfig
from dsa_compile.facts.formats import RECIPES, recipes_with
from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.passes import Numerics, Pass, PassRecord
from dsa_compile.ir.program import Level, Program
from dsa_compile.ir.region import Region
from dsa_compile.passes.listing import listing
from dsa_compile.passes.manager import check_selection, pass_names, run_pipeline
from dsa_compile.passes.pipeline import PIPELINE
from dsa_compile.passes.selection import RUNTIME_REQUIRES
from examples.small_models.models import tiny_config

PASSES = [step for step in PIPELINE if isinstance(step, Pass)]
SEVERAL = (Layout(tp=2, shard_embedding=True), Layout(dp=2))


def of_recipe(recipe: str, target: str = "cpu", layout: Layout = ONE_RANK) -> list[str]:
    """Names of the passes that run under a recipe, in order."""
    config = CompileConfig(recipe=recipe, target=target, layout=layout)
    return [step.name for step in PASSES if step.runs(config)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small model."""
    path = tmp_path_factory.mktemp("model")
    tiny_config(2, first_k_dense_replace=1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def exported(model_dir: Path) -> Program:
    """The small program as exported; fork it."""
    return build_program(model_dir, CompileConfig(weights="none"))


@pytest.fixture(scope="module")
def exported_fp8(model_dir: Path) -> Program:
    """Exported program for recipe fp8."""
    return build_program(model_dir, CompileConfig(weights="none", recipe="fp8"))


def test_names_are_unique_and_those_of_their_modules() -> None:
    assert len(set(pass_names())) == len(PASSES)
    for step in PASSES:
        assert type(step).__module__ == f"dsa_compile.passes.{step.name}"


def test_passes_need_earlier_passes_only() -> None:
    names = pass_names()
    for index, step in enumerate(PASSES):
        assert set(step.requires) <= set(names[:index]), step.name


def test_every_module_of_a_pass_is_in_the_pipeline() -> None:
    """A pass that is written but not listed would never run."""
    folder = Path(__file__).parent.parent.parent / "passes"
    for path in folder.glob("*.py"):
        module = importlib.import_module(f"dsa_compile.passes.{path.stem}")
        defined = [
            kind
            for kind in vars(module).values()
            if isinstance(kind, type)
            and issubclass(kind, Pass)
            and kind.__module__ == module.__name__
        ]
        assert all(any(type(step) is kind for step in PASSES) for kind in defined), path


@pytest.mark.parametrize("name", pass_names())
def test_every_pass_has_a_test_of_its_own(name: str) -> None:
    assert (Path(__file__).parent / f"test_{name}.py").is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disable": ("fuse_nrom",)}, "unknown pass 'fuse_nrom'; did you mean 'fuse_add_norm'?"),
        ({"disable": ("qqq",)}, "unknown pass 'qqq'; dsa-compile --list-passes prints them all"),
        ({"stop_after": "absorb"}, "unknown pass 'absorb'; did you mean 'absorb_mla'?"),
        (
            {"disable": ("absorb_mla",), "stop_after": "absorb_mla"},
            "cannot stop after 'absorb_mla': it is disabled",
        ),
        (
            {"disable": ("merge_projections",)},
            "cannot disable 'merge_projections': pack_swiglu needs it (and merge_shared_expert "
            "needs those); --disable merge_projections+ leaves out all of them",
        ),
        (
            {"disable": ("select_logit_rows",)},
            "cannot disable 'select_logit_rows': the runtime needs it",
        ),
    ],
)  # fmt: skip
def test_a_selection_that_cannot_work(options, says: str) -> None:
    with pytest.raises(UserError) as error:
        check_selection(CompileConfig(**options))
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


def test_stopping_early_needs_nothing_later() -> None:
    check_selection(CompileConfig(disable=("split_short_long",), stop_after="absorb_mla"))
    check_selection(CompileConfig(disable=("select_logit_rows",), stop_after="strip_noise"))


def optional(recipe: str) -> list[str]:
    """Passes that can be switched off alone under a recipe."""
    run = [step for step in PASSES if step.runs(CompileConfig(recipe=recipe))]
    needed = {name for step in run for name in step.requires} | set(RUNTIME_REQUIRES)
    return [step.name for step in run if step.name not in needed]


def test_fusions_and_the_split_can_be_switched_off() -> None:
    common = {"split_short_long"}
    assert common | {"merge_shared_expert", "fuse_add_norm_across_layers"} <= set(optional("fp32"))
    fusions = {
        "fuse_norm_quantize_across_layers", "fuse_swiglu_quantize", "fuse_attention_inputs",
    }  # fmt: skip
    assert common | fusions | {"quantize_experts"} <= set(optional("fp8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", optional("fp32"))
def test_without_one_pass_the_program_is_still_legal(exported: Program, name: str) -> None:
    program = exported.fork(CompileConfig(weights="none", disable=(name,)))
    run_pipeline(program)  # verifies both levels
    assert program.level is Level.KERNEL
    assert [r.name for r in program.records] == [n for n in of_recipe("fp32") if n != name]


@pytest.mark.parametrize("name", optional("fp8"))
def test_the_same_in_fp8(exported_fp8: Program, name: str) -> None:
    program = exported_fp8.fork(CompileConfig(weights="none", recipe="fp8", disable=(name,)))
    run_pipeline(program)
    assert program.level is Level.KERNEL
    assert [r.name for r in program.records] == [n for n in of_recipe("fp8") if n != name]


def test_a_recipes_passes_run_under_it_alone() -> None:
    fp32, bf16, fp8, kv_tensor = (set(of_recipe(recipe)) for recipe in RECIPES)
    assert fp32 == bf16
    for step in PASSES:
        if not step.formats and step.targets == TARGETS and not step.cuts:
            assert step.name in fp32 & fp8 & kv_tensor
    assert fp8 == kv_tensor  # one pass makes the rows of either
    for step in PASSES:
        if "quantize" in step.name and not step.cuts:
            assert step.name in fp8 - fp32, step.name
    everywhere = (
        of_recipe(recipe, target, layout)
        for recipe in RECIPES
        for target in TARGETS
        for layout in (ONE_RANK, *SEVERAL)
    )
    assert set(pass_names()) == {name for names in everywhere for name in names}


def test_a_model_of_one_rank_is_not_cut() -> None:
    cutting = {step.name for step in PASSES if step.cuts}
    assert cutting.isdisjoint(of_recipe("fp8"))
    assert cutting <= {name for layout in SEVERAL for name in of_recipe("fp8", layout=layout)}


def test_a_pass_runs_on_its_targets_alone() -> None:
    for_gpus = {"compile_pointwise", "overlap_streams"}
    assert for_gpus.isdisjoint(of_recipe("bf16"))
    assert for_gpus <= set(of_recipe("bf16", "sm_90a"))
    says = "'overlap_streams': recipe fp32 for target cpu does not run it"
    with pytest.raises(UserError, match=says):
        check_selection(CompileConfig(stop_after="overlap_streams"))


def test_what_needs_a_pass_of_another_recipe_does_not_bind_this_one() -> None:
    """``fuse_norm_quantize_across_layers`` does not run in fp32."""
    norm = ("fuse_add_norm_across_layers",)
    check_selection(CompileConfig(disable=norm))
    says = "'fuse_add_norm_across_layers': fuse_norm_quantize_across_layers needs it"
    with pytest.raises(UserError, match=says):
        check_selection(CompileConfig(recipe="fp8", disable=norm))


def test_stop_after_is_the_last_pass_and_progress_sees_each(exported: Program) -> None:
    program = exported.fork(CompileConfig(weights="none", stop_after="recognize_router"))
    seen: list[PassRecord] = []
    run_pipeline(program, seen.append)
    assert seen == program.records
    assert seen[-1].name == "recognize_router"
    assert program.level is Level.EXPORTED


class _Failing(Pass):
    """A pass that promises what is not there, or raises what it is given."""

    name = "failing"
    numerics = Numerics.BITWISE

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def expects(self, program: Program, region: Region) -> int:
        return 1

    def run(self, program: Program, record: PassRecord) -> None:
        if self._error is not None:
            raise self._error


WAY_IN = "compile with --stop-after strip_noise and run dsa-inspect bisect"


def test_a_broken_promise_says_how_to_look_before_it(exported: Program) -> None:
    program = exported.fork(CompileConfig(weights="none"))
    with pytest.raises(CompileError, match=rf"^pass failing: matched 0 of 1 .*; .*{WAY_IN}$"):
        run_pipeline(program, pipeline=[PASSES[0], _Failing()])
    program = exported.fork(CompileConfig(weights="none"))
    with pytest.raises(CompileError, match=r"nothing came near$"):  # nothing is before it
        run_pipeline(program, pipeline=[_Failing()])


def test_a_pass_that_fails_otherwise_says_so_in_a_note(exported: Program) -> None:
    program = exported.fork(CompileConfig(weights="none"))
    with pytest.raises(ZeroDivisionError) as error:
        run_pipeline(program, pipeline=[PASSES[0], _Failing(ZeroDivisionError())])
    assert [note.endswith(WAY_IN) for note in error.value.__notes__] == [True]


def test_a_fork_leaves_the_original_alone(exported: Program) -> None:
    nodes = {name: region.node_count() for name, region in exported.regions.items()}
    run_pipeline(exported.fork(CompileConfig(weights="none")))
    assert {name: region.node_count() for name, region in exported.regions.items()} == nodes
    assert exported.records == []


def test_the_listing_names_every_step_in_order() -> None:
    lines = list(listing())
    heads = [head(step) if isinstance(step, Pass) else f"--- {step.name} ---" for step in PIPELINE]
    assert [line for line in lines if line in heads] == heads
    at = lines.index("merge_projections (tolerance)")
    assert lines[at + 1 : at + 3] == [
        "    Merge projections that read the same activations into one.",
        "    needed by pack_swiglu, fuse_attention_inputs",
    ]
    assert "quantize_experts (tolerance; recipe fp8, fp8-kv-tensor)" in lines


def head(step: Pass) -> str:
    """Heading of a pass in the listing."""
    recipes = f"; recipe {', '.join(recipes_with(step.formats))}" if step.formats else ""
    targets = "" if step.targets == TARGETS else f"; target {', '.join(step.targets)}"
    options = {"tp": "--tp", "dp": "--dp", "world": "--tp or --dp"}
    ranks = f"; with {options[step.cuts]}" if step.cuts else ""
    return f"{step.name} ({step.numerics.value}{recipes}{targets}{ranks})"
