"""Every registered op is made by some pass, and every kernel in the table is of one."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV32Config

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.formats import RECIPES
from dsa_compile.facts.layout import Layout
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.program import Program
from dsa_compile.kernels.table import KERNELS
from dsa_compile.ops import FACTS, REFERENCE
from dsa_compile.passes.manager import run_pipeline
from examples.small_models.models import tiny_mistral_config, yarn_parameters

TARGET = "sm_90a"  # of which the passes expect the most; on the CPU they leave some out


def made(program: Program) -> set[object]:
    """Targets that the graphs call after any of the passes; a later one may replace them."""
    calls: set[object] = set()

    def collect(record: object) -> None:
        calls.update(n.target for r in program.regions.values() for n in r.graph.nodes)

    run_pipeline(program, progress=collect)
    return calls


@pytest.mark.slow
def test_some_pass_makes_every_op(tmp_path: Path) -> None:
    """The geometry is the released one: fusions that no kernel would take are left alone."""
    DeepseekV32Config(
        rope_parameters=yarn_parameters(), max_position_embeddings=163840
    ).save_pretrained(tmp_path)
    calls: set[object] = set()
    for recipe in RECIPES:
        config = CompileConfig(
            recipe=recipe, target=TARGET, weights="none", layers=(2, 3), records=False
        )
        calls |= made(build_program(tmp_path, config))
    for layout in (Layout(tp=8, ep=8, shard_embedding=True), Layout(dp=2, ep=2)):
        calls |= made(build_program(tmp_path, replace(config, layout=layout)))
    ops = {op for op in FACTS if op.namespace == "dsa"}
    if find_spec("transformers.models.mistral_large4"):
        tiny_mistral_config().save_pretrained(tmp_path / "mistral")
        config = CompileConfig(recipe="fp32", target="cpu", weights="none", records=False)
        calls |= made(build_program(tmp_path / "mistral", config))
    else:  # only Mistral-Large-4 scales its queries
        ops.remove(torch.ops.dsa.scale_by_position.default)
    assert {str(op) for op in ops - calls} == set()


def test_every_kernel_in_the_table_is_of_an_op() -> None:
    names = {str(op).split(".")[1] for op in REFERENCE}
    assert {kernel.op for kernel in KERNELS} <= names
