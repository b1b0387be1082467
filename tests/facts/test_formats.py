"""Formats as data beside what is kept in them: rows of caches, and values brought back."""

from pathlib import Path

import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.formats import E4M3_MATRIX, E4M3_ROWS, RECIPES
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.region import Role
from dsa_compile.ops.quantize import dequantize_blocks, dequantize_weight, quantize_blocks
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.weights.block_fp8 import quantize_rows
from examples.small_models.models import tiny_config


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_the_caches_have_the_bytes_that_their_formats_say(
    name: str, tmp_path: Path
) -> None:
    config = tiny_config(1, first_k_dense_replace=1)
    config.save_pretrained(tmp_path)
    program = build_program(tmp_path, CompileConfig(weights="none", recipe=name))
    run_pipeline(program)
    region = next(r for r in program.regions.values() if r.kind == "dense")
    caches = [node.meta["val"] for node in region.inputs_of(Role.CACHE)]
    rows = [int(cache.shape[-1]) * cache.dtype.itemsize for cache in caches]
    recipe = RECIPES[name]
    assert sorted(rows) == sorted(
        (
            recipe.latent_bytes(config.kv_lora_rank, config.qk_rope_head_dim),
            recipe.index_rows.row_bytes(config.index_head_dim),
        )
    )


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
def test_values_come_back_within_the_bound_of_their_format(scale: float) -> None:
    torch.manual_seed(0)
    wide = torch.randn(200, 320) * scale
    rows = dequantize_blocks(*quantize_blocks(wide, False))
    matrix = dequantize_weight(*quantize_rows(wide))
    for got, kept in ((rows, E4M3_ROWS), (matrix, E4M3_MATRIX)):
        tall, across = (1, *kept.block)[-2:]
        for block, back in zip(wide.split(tall), got.split(tall), strict=True):
            for part, other in zip(block.split(across, 1), back.split(across, 1), strict=True):
                largest = max(part.abs().max().item(), 1e-4)  # a floor under the scale of rows
                assert (part - other).abs().max().item() <= kept.error * largest
