"""A group of ranks is a runner like any other: two threads, each with its share of the caches.

Rank 0 holds the latent rows, rank 1 the index rows. Each gets every step, sums its own rows, adds
the other's sum to it and chooses the tokens for itself, so no token travels between them.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.sampling.device_sampler import DeviceSampler
from dsa_compile.runtime.sampling.host_choice import known_tokens
from dsa_compile.runtime.sampling.sampler import Sampler
from tests.runtime.hash_runner import HashRunner, reference_tokens

SIZE = 4
VOCAB = 64
RANKS = 2


class Collective:
    """Sums over the ranks, each of which gets the result."""

    def __init__(self):
        self.parts = [[] for _ in range(RANKS)]
        self.barrier = threading.Barrier(RANKS)

    def all_reduce(self, rank, part):
        self.parts[rank] = part
        self.barrier.wait()
        total = [sum(each) % 2**64 for each in zip(*self.parts, strict=True)]
        self.barrier.wait()
        return total


class Rank(HashRunner):
    def __init__(self, number, collective, rows, *sizes):
        super().__init__(*sizes)
        self.number, self.collective = number, collective
        self.tokens = torch.zeros(rows, dtype=torch.int64)
        self.device_sampler = DeviceSampler(VOCAB, self.tokens)
        self.host_sampler = Sampler(VOCAB)
        self.thread = ThreadPoolExecutor(1)

    def step(self, inputs):
        try:
            batch = inputs.batch
            last = self.tokens.numpy()[np.repeat(batch.request_rows, np.diff(batch.cu_seqlens))]
            batch = replace(batch, input_ids=np.where(batch.input_ids < 0, last, batch.input_ids))
            logits = self.logits(batch, self.collective.all_reduce(self.number, self.sums(batch)))
            if inputs.ahead:
                return self.device_sampler.launch(logits, inputs).wait()
            return known_tokens(self.host_sampler, logits, inputs).wait()
        except BaseException:
            self.collective.barrier.abort()
            raise

    def _write(self, batch, token, rows):
        super()._write(batch, token, rows)
        self.caches[1 - self.number, batch.slot_mapping[token]] = 0  # the other rank's


class GroupTokens:
    def __init__(self, futures):
        self.futures = futures

    def sample(self):
        pass

    def wait(self):
        first, *others = (future.result() for future in self.futures)
        assert all(other.results == first.results for other in others)
        return first


class RankGroup:
    num_drafts = 0
    num_lanes = 1
    overlaps = True
    eos_token_ids = ()

    def __init__(self, num_blocks, rows=256):
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, SIZE, VOCAB
        self.max_model_len, self.rows_ahead = 2000, rows
        self.step_counts = {}
        collective = Collective()
        self.ranks = [Rank(n, collective, rows, num_blocks, SIZE, VOCAB) for n in range(RANKS)]

    def samples_ahead(self, states):
        # The ranks' threads share states, which must not change while special ones are looked at.
        return not any(state.special for state in states)

    def launch(self, inputs):
        return GroupTokens([rank.thread.submit(rank.step, inputs) for rank in self.ranks])


def prompts(count):
    rng = np.random.default_rng(count)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, 40, count)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_blocks", [300, 40])
def test_two_ranks_give_the_tokens_of_one(overlap, num_blocks):
    """With room for all, and where requests are preempted and prefixes used again."""
    engine = Engine(
        RankGroup(num_blocks), EngineOptions(max_num_batched_tokens=32, async_scheduling=overlap)
    )
    asked = prompts(16)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    for _ in range(2):
        for prompt, output in zip(asked, engine.generate(asked, params), strict=True):
            assert output.token_ids == reference_tokens(prompt, 12, VOCAB)
    assert engine.stats().owned_blocks == 0
    assert (engine.stats().preemptions > 0) == (num_blocks == 40)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    "options", [{"temperature": 3.0}, {"repetition_penalty": 1.3, "logprobs": 1}]
)
def test_every_rank_draws_the_same_token(overlap, options):
    params = [SamplingParams(max_tokens=10, seed=n, **options) for n in range(6)]
    asked = prompts(6)
    engine = Engine(RankGroup(300), EngineOptions(async_scheduling=overlap))
    alone = Engine(HashRunner(300, SIZE, VOCAB))
    found = [output.token_ids for output in engine.generate(asked, params)]
    assert found == [output.token_ids for output in alone.generate(asked, params)]
