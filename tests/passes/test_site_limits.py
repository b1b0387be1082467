"""A pass that is stopped after some of its rewrites leaves a program that still computes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.passes import Pass, RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.passes.pipeline import PIPELINE
from examples.small_models.models import save_hf, tiny_config, tiny_model
from tests.passes.sketch import canonical
from tests.quick_cases import quick_first

RECIPES = ("fp32", "fp8")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer and an MoE layer, with widths that recipe fp8 takes."""
    made = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1)), made)
    return made


def stages(model_dir: Path, recipe: str) -> Iterator[tuple[Pass, Program, Program]]:
    """Each pass with the program before it and after it."""
    program = build_program(model_dir, CompileConfig(recipe=recipe))
    for step in PIPELINE:
        if not isinstance(step, Pass):
            program.level = step
        elif step.runs(program.config):
            before = fork(program)
            step(program)
            yield step, before, program


def fork(program: Program) -> Program:
    copy = program.fork(program.config)
    return replace(copy, level=program.level)


def graphs(program: Program) -> dict[str, object]:
    """Names left out: a copied graph hands out other ones."""
    return {name: canonical(region) for name, region in program.regions.items()}


def check_weights(program: Program) -> None:
    for region in program.regions.values():
        planned = program.weights.entries(region.kind)
        for node in region.inputs_of(Role.WEIGHT):
            value, entry = node.meta["val"], planned[node.meta["key"]]
            assert (entry.torch_dtype, entry.shape) == (value.dtype, tuple(value.shape))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_limit_of_every_pass(model_dir: Path, recipe: str) -> None:
    for step, before, after in stages(model_dir, recipe):
        whole = after.records[-1].journal.sites
        assert [site.number for site in whole] == list(range(1, len(whole) + 1)), step.name
        if isinstance(step, RegionPass):
            assert len(whole) == sum(after.records[-1].by_region.values()), step.name
        for limit in range(len(whole) + 1):
            partial = fork(before)
            record = step(partial, limit)
            assert len(record.journal.sites) == limit, (step.name, limit)
            where = [(site.region, site.path) for site in record.journal.sites]
            assert where == [(site.region, site.path) for site in whole[:limit]], step.name
            check_weights(partial)
            for region in partial.regions.values():
                region.graph.lint()
            if limit == 0:
                assert not record.by_region, step.name
            if limit == len(whole):
                assert graphs(partial) == graphs(after), step.name


@pytest.mark.parametrize("recipe", quick_first(RECIPES))
def test_a_site_names_what_it_took_out_and_put_in(model_dir: Path, recipe: str) -> None:
    for step, before, after in stages(model_dir, recipe):
        earlier: set[str] = set()
        for site in after.records[-1].journal.sites:
            if not site.region:
                continue
            region = after.regions.get(site.region) or after.regions[f"{site.region}.long"]
            old = {node.name for node in before.regions[site.region].graph.nodes}
            new = {node.name for node in region.graph.nodes}
            assert set(site.removed) <= old | earlier, (step.name, site)
            earlier |= set(site.made)
            assert site.removed or site.made, (step.name, site)
            # a pass may merge what several of its rewrites made
            assert len(set(site.made) & new) >= min(len(site.made), 1) or not site.made, (
                step.name,
                site,
            )
