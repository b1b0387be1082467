"""The artifact's greedy tokens and logits are the reference's."""

import numpy as np
import pytest
import torch

from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.quick_cases import quick_first

from .conftest import CASES

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_single_requests(case, name):
    """From one token to eight times index_topk, and across index_topk while generating."""
    c = case(name)
    k = c.topk
    lengths = [1, 2, k - 5, k - 1, k, k + 1, 3 * k + 7, 8 * k]
    prompts = c.prompts(lengths)
    engine = Engine.load(c.artifact)
    for prompt in prompts:
        (out,) = engine.generate([prompt], GREEDY)
        assert out.token_ids == c.reference(prompt, GREEDY.max_tokens), len(prompt)
        assert out.finish_reason == "length"


@pytest.mark.parametrize("name", quick_first(CASES))
def test_tokens_of_thirty_two_interleaved_requests(case, name):
    """Mixed lengths, prefill in chunks that end anywhere, decode steps in between."""
    c = case(name)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 6 * c.topk, (32,), generator=generator).tolist()
    prompts = c.prompts(lengths, seed=1)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    engine = Engine.load(c.artifact, max_num_batched_tokens=57)
    outs = engine.generate(prompts, params)
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.token_ids == c.reference(prompt, params.max_tokens), len(prompt)


@pytest.mark.parametrize("name", CASES)
def test_logits(case, name):
    """Within 1e-4 of the reference at every position of a prompt, fed in one step and in pieces."""
    c = case(name)
    (prompt,) = c.prompts([5 * c.topk], seed=2)
    with torch.no_grad():
        want = c.model(torch.tensor([prompt]), use_cache=False).logits[0]
    for pieces in ([len(prompt)], [c.topk, 3, 1, 2 * c.topk, len(prompt) - 3 * c.topk - 4]):
        runner = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=40))
        got, start = [], 0
        for count in pieces:
            got.append(runner.execute(one_request(prompt, start, count, runner.block_size)))
            start += count
        torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=1e-4)


def one_request(prompt: list[int], start: int, count: int, block_size: int) -> Batch:
    """The step that feeds ``count`` tokens of a request whose blocks lie in reverse order."""
    positions = np.arange(start, start + count)
    blocks = -(-(start + count) // block_size)
    table = np.arange(39, 39 - blocks, -1, dtype=np.int32)
    return Batch(
        input_ids=np.array(prompt[start : start + count]),
        positions=positions,
        slot_mapping=table[positions // block_size].astype(np.int64) * block_size
        + positions % block_size,
        block_tables=table[None],
        cu_seqlens=np.array([0, count], np.int32),
        context_lens=np.array([start + count], np.int32),
        logit_rows=np.arange(count),
        request_rows=np.zeros(1, np.int32),
    )
