"""The geometry of the small model that is made for GPU kernels."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.formats import E4M3_MATRIX, recipes_with
from dsa_compile.frontend.build import build_program
from dsa_compile.kernels.implementation import HOPPER
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.passes.manager import run_pipeline
from examples.tiny_v32.attention import Select
from examples.tiny_v32.choice import config_of
from examples.tiny_v32.config import TinyConfig
from examples.tiny_v32.export import FILE, load_checkpoint, write_checkpoint
from examples.tiny_v32.model import TinyModel
from examples.tiny_v32.quantize_fp8 import quantize_checkpoint
from examples.tiny_v32_fp8.config import CONFIG
from tests.trained import trained_model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model in FP8 blocks, beside the bf16 one that it was made from."""
    root = tmp_path_factory.mktemp("untrained")
    model = TinyModel(CONFIG)
    model.initialise(0)
    write_checkpoint(model, trained_model(), root / "bf16")
    quantize_checkpoint(root / "bf16", root / "fp8")
    return root


def test_a_checkpoint_states_its_geometry(exported: Path) -> None:
    stated = config_of(exported / "fp8")
    assert asdict(stated) == asdict(CONFIG) != asdict(TinyConfig())
    model = load_checkpoint(exported / "bf16")
    with torch.inference_mode():
        logits, _, _ = model(torch.arange(3, 90)[None], Select.TOPK, mtp=False)
    assert logits.shape == (1, 87, stated.vocab_size)


def test_it_can_be_committed(exported: Path) -> None:
    """12 MB at the most, most of it in FP8 blocks, none of them partial but by rows."""
    assert (exported / "fp8" / FILE).stat().st_size <= 12e6
    stored = load_file(exported / "fp8" / FILE)
    blocks = [tensor for tensor in stored.values() if tensor.dtype == torch.float8_e4m3fn]
    assert sum(tensor.numel() for tensor in blocks) > 7e6
    assert all(tensor.shape[1] % 128 == 0 for tensor in blocks)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipes_with({"weights": E4M3_MATRIX}))
def test_kernels_made_for_the_released_model_take_it(exported: Path, recipe: str) -> None:
    """All ops that have a kernel in CUDA C++ get it, but two that want rows of 1,024 values."""
    program = build_program(
        exported / "fp8", CompileConfig(recipe=recipe, target=HOPPER, weights="none")
    )
    run_pipeline(program)
    bound = {b.op.split(".")[1]: {r.provider for r in b.records()} for b in bind_kernels(program)}
    small_rows = {"router", "index_head_weights"}
    rows = "" if recipe == "fp8" else "_tensor"
    assert {op for op, providers in bound.items() if providers == {"triton"}} == {
        *small_rows,
        "rope_interleaved",  # of prompts, where other variants have it fused, and so is the next
        "quantize_blocks",
        "embedding",
        "dense_slots",
        "rope_tables",
    }
    prompts = f"paged_prompt_attention_fp8{rows}"
    for op in (
        prompts,
        "experts_fp8",
        "linear_fp8",
        "paged_index_topk_fp8",
        "attention_inputs_fp8",
    ):
        assert bound[op] == {"cuda"}, op
