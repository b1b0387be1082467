"""Log-probabilities of prompts are those of the reference model."""

import pytest
import torch

from dsa_compile.runtime import Engine, SamplingParams

from .conftest import CASES

WANTED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3, logprobs=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_prompts(case, name) -> None:
    """Prompts have any length, come in pieces, beside others, and with shared prefixes cached."""
    c = case(name)
    prompts = c.prompts([1, 2, c.topk + 1, 5 * c.topk], seed=4)
    prompts.append(prompts[-1][: 3 * c.topk] + prompts[1])
    engine = Engine.load(c.artifact, max_num_batched_tokens=29, max_num_seqs=8)
    engine.generate(prompts[-1:], SamplingParams(max_tokens=1))
    for prompt, output in zip(prompts, engine.generate(prompts, WANTED), strict=True):
        with torch.no_grad():
            want = c.model(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(-1)
        entries = output.prompt_logprobs + output.logprobs
        assert [entry.token_id for entry in entries] == prompt[1:] + output.token_ids
        for row, entry in zip(want, entries, strict=True):
            for token, value in ((entry.token_id, entry.logprob), *entry.top):
                assert value == pytest.approx(row[token].item(), abs=2e-4)
            assert [value for _, value in entry.top] == pytest.approx(
                row.topk(3).values.tolist(), abs=2e-4
            )
    assert engine.stats().owned_blocks == 0
