"""Which selections of passes are taken, and what a run of the pipeline does."""

from pathlib import Path

import pytest

from dsa_compile.config import CompileConfig
from dsa_compile.errors import UserError
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.passes import Pass, PassRecord
from dsa_compile.ir.program import Level, Program
from dsa_compile.passes.listing import listing
from dsa_compile.passes.manager import (
    RUNTIME_REQUIRES,
    check_selection,
    pass_names,
    run_pipeline,
)
from dsa_compile.passes.pipeline import PIPELINE
from dsa_compile.testing.models import tiny_config

PASSES = [step for step in PIPELINE if isinstance(step, Pass)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A small program as exported; fork it."""
    model_dir = tmp_path_factory.mktemp("model")
    tiny_config(2, first_k_dense_replace=1).save_pretrained(model_dir)
    return build_program(model_dir, CompileConfig(weights="none"))


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
    helpers = {"__init__", "listing", "manager", "pipeline", "shared"}
    assert {path.stem for path in folder.glob("*.py")} - helpers == set(pass_names())


@pytest.mark.parametrize("name", pass_names())
def test_every_pass_has_a_test_of_its_own(name: str) -> None:
    assert (Path(__file__).parent / f"test_{name}.py").is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disable": ("fuse_nrom",)}, "unknown pass 'fuse_nrom'; did you mean 'fuse_add_norm'?"),
        ({"disable": ("qqq",)}, "unknown pass 'qqq'; passes: strip_noise, "),
        ({"stop_after": "absorb"}, "unknown pass 'absorb'; did you mean 'absorb_mla'?"),
        (
            {"disable": ("absorb_mla",), "stop_after": "absorb_mla"},
            "cannot stop after 'absorb_mla': it is disabled",
        ),
        (
            {"disable": ("merge_projections",)},
            "cannot disable 'merge_projections': pack_swiglu needs it; disable that one too",
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


def optional() -> list[str]:
    """Passes that can be switched off alone."""
    needed = {name for step in PASSES for name in step.requires} | set(RUNTIME_REQUIRES)
    return [step.name for step in PASSES if step.name not in needed]


def test_fusions_and_the_split_can_be_switched_off() -> None:
    assert {"pack_swiglu", "fuse_add_norm_across_layers", "split_short_long"} <= set(optional())


@pytest.mark.parametrize("name", optional())
def test_without_one_pass_the_program_is_still_legal(exported: Program, name: str) -> None:
    program = exported.fork(CompileConfig(weights="none", disable=(name,)))
    run_pipeline(program)  # verifies both levels
    assert program.level is Level.KERNEL
    assert [record.name for record in program.records] == [n for n in pass_names() if n != name]


def test_stop_after_is_the_last_pass_and_progress_sees_each(exported: Program) -> None:
    program = exported.fork(CompileConfig(weights="none", stop_after="recognize_router"))
    seen: list[PassRecord] = []
    run_pipeline(program, seen.append)
    assert seen == program.records
    assert seen[-1].name == "recognize_router"
    assert program.level is Level.EXPORTED


def test_a_fork_leaves_the_original_alone(exported: Program) -> None:
    nodes = {name: region.node_count() for name, region in exported.regions.items()}
    run_pipeline(exported.fork(CompileConfig(weights="none")))
    assert {name: region.node_count() for name, region in exported.regions.items()} == nodes
    assert exported.records == []


def test_the_listing_names_every_step_in_order() -> None:
    lines = list(listing())
    heads = [f"{p.name} ({p.numerics.value})" if isinstance(p, Pass) else f"--- {p.name} ---"
             for p in PIPELINE]  # fmt: skip
    assert [line for line in lines if line in heads] == heads
    at = lines.index("merge_projections (tolerance)")
    assert lines[at + 1 : at + 3] == [
        "    Merge projections that read the same activations into one.",
        "    needed by pack_swiglu",
    ]
