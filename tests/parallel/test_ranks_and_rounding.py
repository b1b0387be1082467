"""Rounding of an answer's logits, which several ranks may change, and all that they may not.

A sum over ranks is another order of its terms, so outside fp32 the tokens of two ranks need not be
those of one. Those of two ranks are the same whatever drafts, and whatever other requests ask for.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, Grammar, RequestOutput, SamplingParams

from .conftest import LAYOUTS

PROMPTS: list[str | list[int]] = ["import os", list(range(3, 70)), "def main():", [5, 6, 7, 8] * 9]
HELD = (0, 2)  # of the prompts, those whose requests have a grammar


def answers(path: Path, held: Collection[int] = (), **options: Any) -> list[RequestOutput]:
    """Greedy answers of a deterministic engine, some of them held to a grammar."""
    grammar = Grammar("regex", "[a-z ]{24}")
    params = [
        SamplingParams(max_tokens=16, temperature=0.0, grammar=grammar if n in held else None)
        for n in range(len(PROMPTS))
    ]
    options |= {"num_gpu_blocks_override": 64, "max_num_seqs": 4, "max_num_batched_tokens": 48}
    with Engine.load(path, deterministic=True, **options) as engine:
        return engine.generate(PROMPTS, params)


@pytest.mark.slow
def test_rounding_aside_drafts_and_grammars_change_nothing(artifact: Callable[[str], Path]) -> None:
    """In a recipe that rounds, on two ranks: one shape of steps, so the same bits on any CPU."""
    pytest.importorskip("xgrammar")
    path = artifact("tp2-mtp-bf16")
    free = [output.token_ids for output in answers(path, draft="none")]
    held = [output.token_ids for output in answers(path, HELD, draft="none")]
    for number in range(len(PROMPTS)):
        assert (held[number] != free[number]) == (number in HELD)
    for draft in ("mtp", "ngram"):
        outputs = answers(path, HELD, draft=draft, num_speculative_tokens=3)
        assert [output.token_ids for output in outputs] == held
        assert sum(output.accepted[0] for output in outputs if output.accepted) > 0


def prompt_logprobs(path: Path) -> torch.Tensor:
    """Log-probabilities of random prompts, each token given the same tokens on any engine."""
    draws = torch.Generator().manual_seed(0)
    prompts = [torch.randint(512, (90,), generator=draws).tolist() for _ in range(6)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with Engine.load(path, num_gpu_blocks_override=64) as engine:
        outputs = engine.generate(prompts, params)
    return torch.tensor([e.logprob for o in outputs for e in (o.prompt_logprobs or ())[1:] if e])


@pytest.mark.slow
def test_two_ranks_are_no_farther_from_fp32_than_one(fp8_model: Path, tmp_path: Path) -> None:
    """The recipe that rounds most, on a random model, whose tokens nearly tie."""
    found = {}
    for recipe in ("fp32", "fp8-kv-tensor"):
        for name in ("one", "tp2"):
            path = tmp_path / f"{recipe}-{name}"
            compile_model(
                fp8_model, path, target="cpu", recipe=recipe, layout=LAYOUTS[name], records=False
            )
            found[recipe, name] = prompt_logprobs(path)
    exact = found["fp32", "one"]
    torch.testing.assert_close(found["fp32", "tp2"], exact, atol=1e-3, rtol=0)
    one, two = (found["fp8-kv-tensor", name] for name in ("one", "tp2"))
    error = (one - exact).abs().mean()
    assert (two - exact).abs().mean() < 1.25 * error  # 0.98 of it; the vocabulary exchanged: 4.9
    assert (two - one).abs().mean() < error
