"""Every op of the released geometry has a kernel, in every recipe and on every GPU."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import DeepseekV32Config

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.formats import RECIPES
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.program import Program
from dsa_compile.kernels.implementation import GPUS
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.passes.manager import run_pipeline
from examples.small_models.models import yarn_parameters

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Program]:
    """A dense and an MoE layer, exported once for each recipe."""
    model_dir = tmp_path_factory.mktemp("model")
    DeepseekV32Config(
        rope_parameters=yarn_parameters(), max_position_embeddings=163840
    ).save_pretrained(model_dir)

    @functools.cache
    def export(recipe: str) -> Program:
        return build_program(model_dir, CompileConfig(recipe=recipe, weights="none", layers=(2, 3)))

    return export


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_op_has_a_kernel(
    exported: Callable[[str], Program], recipe: str, target: str
) -> None:
    program = exported(recipe)
    program = program.fork(replace(program.config, target=target))
    run_pipeline(program)
    for binding in bind_kernels(program):
        # the last takes any number of tokens
        assert binding.records()[-1].max_tokens is None, binding.op
