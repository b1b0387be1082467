"""Whole models on a Hopper GPU, through the registry's kernels."""

from pathlib import Path

import pytest
import torch

from dsa_compile.compiling import compile_model
from dsa_compile.runtime import Engine, SamplingParams

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
TRAINED = Path(__file__).parents[2] / "examples" / "tiny_v32" / "checkpoint"


def tokens(artifact, prompts, count=24):
    engine = Engine.load(artifact)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


def prompts(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 1500, (n,), generator=generator).tolist() for n in lengths]


def test_fp32_gives_the_tokens_of_the_cpu(tmp_path):
    """Around the top-k of 64, alone and together, prefill in chunks and decode."""
    asked = prompts([1, 5, 63, 64, 65, 130, 300])
    for target in ("cpu", "sm_90a"):
        compile_model(TRAINED, tmp_path / target, target=target, recipe="fp32")
    assert tokens(tmp_path / "sm_90a", asked) == tokens(tmp_path / "cpu", asked)


def test_bf16_follows_the_cpu(tmp_path):
    """Sums run in another order, so a near-tie may fall otherwise; most tokens must not."""
    asked = prompts([5, 65, 130, 300] * 4)
    for target in ("cpu", "sm_90a"):
        compile_model(TRAINED, tmp_path / target, target=target, recipe="bf16")
    pairs = zip(tokens(tmp_path / "sm_90a", asked), tokens(tmp_path / "cpu", asked), strict=True)
    same = [a == b for gpu, cpu in pairs for a, b in zip(gpu, cpu, strict=True)]
    assert sum(same) / len(same) > 0.8


def test_together_as_alone(tmp_path):
    """A request's tokens do not depend on what runs beside it."""
    compile_model(TRAINED, tmp_path / "a", target="sm_90a", recipe="fp32")
    asked = prompts([7, 64, 90, 200, 33, 150, 12, 75])
    assert tokens(tmp_path / "a", asked) == [tokens(tmp_path / "a", [one])[0] for one in asked]
