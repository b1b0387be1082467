"""Steps of whole prompts run the prompt variant: when, and with the reference's tokens."""

from collections import Counter

import numpy as np
import pytest
import torch

from dsa_compile.frontend.architectures import load_config, spec_of
from dsa_compile.ir.plan import LONG, LONG_PROMPT, PROMPT, SHORT
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.step.released import CONFIG
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.execution.prompt_steps import LEAST_PROMPT_TOKENS, longest_prompt
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.quick_cases import quick_first
from tests.trained import trained_model

from .conftest import CASES, FAMILY
from .test_padding import rows_of, step

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture
def ran(monkeypatch):
    """Variants of the steps, which are prompts from the first token on."""
    found = Counter()
    choose = ModelRunner.variant_of

    def noted(self, batch):
        variant = choose(self, batch)
        found[variant] += 1
        return variant

    monkeypatch.setattr(ModelRunner, "least_prompt_tokens", 1)
    monkeypatch.setattr(ModelRunner, "variant_of", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_first([*CASES, *FAMILY]))
def test_tokens_of_prompts_below_at_and_above_topk(case, ran, name):
    """Alone, several in a step, and in chunks of which the first alone is a prompt's begin."""
    c = case(name)
    k = c.topk
    prompts = c.prompts([1, 2, k - 5, k - 1, k, k + 1, 3 * k + 7], seed=7)
    wanted = [c.reference(prompt, PARAMS.max_tokens) for prompt in prompts]
    alone = Engine.load(c.artifact)
    assert [alone.generate([p], PARAMS)[0].token_ids for p in prompts] == wanted
    assert (ran[PROMPT], ran[LONG_PROMPT]) == (5, 2)
    ran.clear()
    for most in (4096, k, k // 2 + 3):
        engine = Engine.load(c.artifact, max_num_batched_tokens=most)
        outs = engine.generate(prompts[:5], PARAMS)
        assert [out.token_ids for out in outs] == wanted[:5]
        assert ran[PROMPT] >= 1
        ran.clear()
    together = Engine.load(c.artifact, max_num_batched_tokens=4096)  # one above makes the step long
    assert [out.token_ids for out in together.generate(prompts, PARAMS)] == wanted
    assert (ran[PROMPT], ran[LONG_PROMPT]) == (0, 1)


@pytest.mark.slow
def test_a_prompt_behind_a_cached_prefix_is_no_fresh_one(case, ran):
    c = case("ungrouped-6-layers")
    (prompt,) = c.prompts([50], seed=3)
    engine = Engine.load(c.artifact)
    first = engine.generate([prompt], PARAMS)[0].token_ids
    assert (ran[PROMPT], ran[SHORT]) == (1, PARAMS.max_tokens - 1)
    ran.clear()
    assert engine.generate([prompt], PARAMS)[0].token_ids == first
    assert (ran[PROMPT], ran[SHORT]) == (0, PARAMS.max_tokens)


def variant_of(runner, lengths, starts):
    tokens = [[5] * length for length in lengths]
    pages = np.arange(len(lengths)) * 9
    return runner.variant_of(step(runner, tokens, pages, starts, range(len(lengths))))


def test_which_steps_run_it(case):
    c = case("ungrouped-6-layers")
    runner = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=64))
    assert (c.topk, runner.variants) == (64, (LONG, SHORT, PROMPT, LONG_PROMPT))
    half, longest = LEAST_PROMPT_TOKENS // 2, runner.longest_prompt
    assert variant_of(runner, [half, half], [0, 0]) == PROMPT
    assert variant_of(runner, [half, half - 1], [0, 0]) == SHORT  # few tokens
    assert variant_of(runner, [half, half - 1, 20], [0, 1, 0]) == SHORT  # a later chunk
    assert variant_of(runner, [half, half, 1], [0, 0, 7]) == SHORT  # a request that decodes
    assert variant_of(runner, [half, half, 65], [0, 0, 0]) == LONG_PROMPT
    assert variant_of(runner, [LEAST_PROMPT_TOKENS], [0]) == LONG_PROMPT
    assert variant_of(runner, [LEAST_PROMPT_TOKENS - 1], [0]) == LONG  # few tokens
    assert variant_of(runner, [half, half, 65], [0, 1, 0]) == LONG  # a later chunk
    assert variant_of(runner, [half, longest], [0, 0]) == LONG_PROMPT
    assert variant_of(runner, [half, longest + 1], [0, 0]) == LONG
    alike = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=64, deterministic=True))
    assert variant_of(alike, [half, half], [0, 0]) == SHORT
    assert variant_of(alike, [half, half, 65], [0, 0, 0]) == LONG


def test_how_long_prompts_may_be():
    """For the released models: with all heads, and those of a rank of eight."""
    spec = spec_of(load_config(CONFIG).to_dict())
    assert (longest_prompt(spec, 128), longest_prompt(spec, 64)) == (8355, 8355)
    assert longest_prompt(spec, 16) == 33423


def test_rows_and_logits_are_those_of_the_short_variant(case):
    """Pages out of order, other rows NaN, and every row of the caches is written alike."""
    c = case("grouped-4-layers")
    prompts = c.prompts([c.topk, 3, c.topk - 1], seed=5)
    made = {}
    for least in (1, 10**6):
        runner = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=64))
        runner.least_prompt_tokens = least
        for layer in runner.caches.values():
            for cache in layer.values():
                cache.fill_(float("nan"))
        batch = step(runner, prompts, [40, 3, 20], [0, 0, 0], [0, 1, 2])
        made[runner.variant_of(batch)] = runner.execute(batch), rows_of(runner)
    (ours, our_rows), (theirs, their_rows) = made[PROMPT], made[SHORT]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    for a, b in zip(our_rows, their_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "fp8-kv-tensor"])
def test_variants_differ_less_than_the_recipe_rounds(trained, recipe):
    tokens = torch.randint(3, 200, (60,), generator=torch.Generator().manual_seed(0)).tolist()

    def logits(recipe, least):
        runner = load_runner(trained("cpu", recipe), EngineOptions(num_gpu_blocks_override=64))
        runner.least_prompt_tokens = least
        batch = step(runner, [tokens[:40], tokens[40:]], [8, 2], [0, 0], [0, 1])
        assert runner.variant_of(batch) == (PROMPT if least == 1 else SHORT)
        return runner.execute(batch).double()

    exact, prompt, short = logits("fp32", 1), logits(recipe, 1), logits(recipe, 10**6)
    rounding = (short - exact).norm()
    assert (prompt - exact).norm() <= 1.5 * rounding
    assert (prompt - short).norm() <= 1.5 * rounding


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["split_prompts+", "expand_prompt_attention"])
def test_passes_can_be_left_out(tmp_path, ran, left_out):
    compile_model(trained_model(), tmp_path / "artifact", disable=(left_out,))
    engine = Engine.load(tmp_path / "artifact")
    prompt = list(range(3, 40))
    found = engine.generate([prompt], PARAMS)[0].token_ids
    assert ran[PROMPT] == (left_out == "expand_prompt_attention")
    compile_model(trained_model(), tmp_path / "whole")
    assert Engine.load(tmp_path / "whole").generate([prompt], PARAMS)[0].token_ids == found
