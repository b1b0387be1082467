"""Exact arithmetic: what no recipe rounds, and what the types still say."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ops.latent_rows import latent_rows_fp8
from dsa_compile.ops.quantize import dequantize_blocks, quantize_blocks
from dsa_compile.verify.comparison.agreement import worst
from dsa_compile.verify.comparison.stage_calls import compare_calls, run_against
from dsa_compile.verify.execution.exact import ExactArithmetic, ExactTensor, numbers, to_exact
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.execution.stages import Stage, run_stage
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore, evaluate
from dsa_compile.verify.inputs.parameters import RandomParameters
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.weights.plan import Load, QuantizedScales, QuantizedValues

FINE = torch.tensor([1.0, 1.0 + 2.0**-40], dtype=torch.float64)


def fine(dtype: torch.dtype) -> ExactTensor:
    return ExactTensor(FINE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_cast_changes_the_type_and_no_number(dtype: torch.dtype) -> None:
    made = fine(torch.float32).to(dtype)
    assert made.dtype is dtype
    assert torch.equal(numbers(made), FINE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16])
def test_a_copy_lies_on_the_device_it_was_made_for(dtype: torch.dtype) -> None:
    """Copies that ``tolist()`` and ``cpu()`` make of a GPU's values are read on the host."""
    with ExactArithmetic():
        copied = to_exact(torch.ones(3, dtype=dtype)).to("meta")
    assert (copied.device.type, copied.dtype) == ("meta", dtype)


def test_types_are_promoted_as_the_recipe_would() -> None:
    with ExactArithmetic():
        made = fine(torch.bfloat16) + fine(torch.float32)
        one = fine(torch.bfloat16) * torch.tensor(2.0)  # a number without dimensions
    assert (made.dtype, one.dtype) == (torch.float32, torch.bfloat16)


def test_numbers_made_of_integers_are_exact() -> None:
    with ExactArithmetic():
        made = torch.arange(3).float() / 3
    assert torch.equal(numbers(made), torch.arange(3, dtype=torch.float64) / 3)


def test_what_is_written_in_place_is_seen_in_views() -> None:
    cache = to_exact(torch.zeros(2, 3))
    with ExactArithmetic():
        cache.view(-1)[2:4].copy_(fine(torch.float32))
    assert numbers(cache).flatten()[2:4].equal(FINE)


def test_quantised_blocks_and_cache_bytes_keep_every_number() -> None:
    wide = torch.randn(5, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k_pe = ExactTensor(wide[:, :4], torch.bfloat16)
    with ExactArithmetic():
        q, scale = quantize_blocks(ExactTensor(wide, torch.bfloat16), True)
        back = dequantize_blocks(q, scale)
        row = torch.cat([part.contiguous().view(torch.uint8) for part in (q, scale, k_pe)], -1)
        picked = latent_rows_fp8(row[None], torch.arange(5, dtype=torch.int32), 256)
    assert (q.dtype, scale.dtype, row.dtype) == (torch.float8_e4m3fn, torch.float32, torch.uint8)
    assert row.shape == (5, 256 + 8 + 8)
    torch.testing.assert_close(numbers(back), wide, rtol=1e-12, atol=0)
    assert torch.equal(numbers(picked)[:, 256:], wide[:, :4])


def test_bytes_of_several_numbers_are_none() -> None:
    with ExactArithmetic():
        octets = fine(torch.float32).view(torch.uint8)
        assert numbers(octets[4:].view(torch.float32)).tolist() == [FINE[1].item()]
        assert numbers(octets[2:6].view(torch.float32)).isnan().all()


@pytest.fixture(scope="module")
def exported_of(model_dir: Path) -> Callable[..., object]:
    def make(recipe: str, target: str = "cpu") -> object:
        config = CompileConfig(recipe=recipe, target=target, block_size=16, records=False)
        return build_program(model_dir, config)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "target"),
    [("bf16", "cpu"), ("fp8", "cpu"), ("fp8", "sm_90a"), ("fp8-kv-tensor", "cpu")],
)
def test_right_passes_change_no_number(recipe: str, target: str, exported_of) -> None:  # type: ignore[no-untyped-def]
    exported = exported_of(recipe, target)
    store = ExactWeightStore(RandomParameters(exported.spec, range(2)))
    prompt = Prompt.of(random_tokens(27, exported.spec.vocab_size), exported.spec.index_topk, 16)
    before = run_stage(Stage.of(exported, store), prompt, watch=True)
    after = run_against(Stage.of(Replay(exported).final, store), prompt, before)
    assert worst(compare_calls(before, after)).error < 1e-12


def test_quantised_weights_are_the_parameter_over_its_scales(exported_of) -> None:  # type: ignore[no-untyped-def]
    parameters = RandomParameters(exported_of("fp8").spec, range(2))
    load = Load("model.layers.0.mlp.gate_proj.weight")
    wide = evaluate(load, {}, parameters)
    values = evaluate(QuantizedValues(load), {}, parameters)
    scales = evaluate(QuantizedScales(load), {}, parameters)
    torch.testing.assert_close(
        values * scales.repeat_interleave(128, 0)[: len(wide)].repeat_interleave(128, 1)[:, :128],
        wide, rtol=1e-12, atol=0,
    )  # fmt: skip
    assert values.abs().max() > 400
