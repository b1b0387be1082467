"""Every op of the released geometry has a kernel, in every recipe and on every GPU."""

import functools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from transformers import DeepseekV32Config

from dsa_compile.config import RECIPES, CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.program import Program
from dsa_compile.kernels.cuda.compiler import cubin_name
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.implementation import GPUS
from dsa_compile.lowering import launched_kernels as sizes
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.launched_kernels import launched_kernels
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.testing.models import yarn_parameters

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


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-kv-tensor"])
def test_steps_of_other_sizes_launch_no_other_kernels(
    exported: Callable[[str], Program], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found for the sizes tried is what steps of sizes in between launch, too."""
    program = exported(recipe)
    program = program.fork(replace(program.config, target="sm_90a"))
    run_pipeline(program)
    bindings = bind_kernels(program)
    found = compiled(launched_kernels(program, bindings))
    assert {source for source, _ in found} > {"mla_decode.cu", "router.cu", "sample_tokens.cu"}

    draw = random.Random(0)
    monkeypatch.setattr(sizes, "TOKENS", [draw.randint(1, 1024) for _ in range(120)])
    monkeypatch.setattr(sizes, "PROMPT_TOKENS", [draw.randint(2, 8192) for _ in range(60)])
    monkeypatch.setattr(sizes, "CONTEXTS", [draw.randint(1, 163_840) for _ in range(12)])
    others = compiled(launched_kernels(program, bindings))
    assert others <= found
    assert len(others) > 0.5 * len(found)


def compiled(kernels: Iterable[CudaKernel]) -> set[tuple[str, str]]:
    """What is compiled for them."""
    return {(k.source, cubin_name(k.source, arch="sm_90a", defines=k.defines)) for k in kernels}
