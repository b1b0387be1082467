"""A deterministic engine: what is computed for a request has the same shapes whatever else runs."""

from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.errors import UserError
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from tests.runtime.hash_runner import HashRunner

SIZE = 4
VOCAB = 64


class ShapedRunner(HashRunner):
    """Cache rows depend on all tokens of their step, as rounding does: how many tokens a product
    has, and how many of them an expert takes, choose how it is summed.

    Decode steps are all padded to one shape.
    """

    def execute(self, batch):
        decodes = batch.num_tokens == batch.num_requests
        company = 0 if decodes else crc32(batch.input_ids.tobytes())
        return super().execute(replace(batch, input_ids=batch.input_ids + VOCAB * company))


def make_engine(num_blocks=300, deterministic=True, **config):
    options = {"max_num_batched_tokens": 18, "max_num_seqs": 16} | config
    config = EngineOptions(deterministic=deterministic, **options)
    return Engine(ShapedRunner(num_blocks, SIZE, VOCAB), config)


def prompts(count, longest=50, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in rng.integers(1, longest, count)]


def tokens(engine, batch, most=12):
    params = SamplingParams(max_tokens=most, temperature=0.0)
    return [output.token_ids for output in engine.generate(batch, params)]


def test_sixteen_at_once_as_one_at_a_time():
    batch = prompts(16)
    together = make_engine()
    assert tokens(together, batch) == tokens(make_engine(max_num_seqs=1), batch)
    assert tokens(make_engine(deterministic=False), batch) != tokens(
        make_engine(deterministic=False, max_num_seqs=1), batch
    ), "the runner does not notice shapes"


def test_prompts_are_cut_at_fixed_boundaries_and_run_alone():
    engine = make_engine()
    engine.add_request("short", [1, 2, 3], SamplingParams(max_tokens=9, temperature=0.0))
    engine.step()
    engine.add_request("long", [5] * 37, SamplingParams(max_tokens=2, temperature=0.0))
    while engine.has_unfinished():
        engine.step()
    steps = [(b.num_requests, b.num_tokens) for b in engine._runner.steps]
    assert steps[:5] == [(1, 3), (1, 16), (1, 16), (1, 5), (2, 2)]
    assert set(steps[5:]) == {(1, 1)}


def test_preempted_requests_recompute_what_they_had_alike():
    batch = prompts(10, 30)
    tight = make_engine(16)
    assert tokens(tight, batch, 20) == tokens(make_engine(max_num_seqs=1), batch, 20)
    assert tight.stats().preemptions > 0


def test_only_whole_chunks_of_prompts_are_reused():
    engine = make_engine()
    prompt = list(range(40))
    params = SamplingParams(max_tokens=20, temperature=0.0)
    cold, warm = (engine.generate([prompt], params)[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
    assert warm.token_ids == cold.token_ids
    longer = prompt + cold.token_ids
    again = engine.generate([longer], params)[0]
    assert again.cached_tokens == 32, "rows of generated tokens were computed in decode steps"
    assert again.token_ids == make_engine().generate([longer], params)[0].token_ids


def test_what_shares_blocks_but_no_whole_chunk_is_computed_apart():
    """Chunks of four blocks; what was computed before begins alike and ends otherwise."""
    rng = np.random.default_rng(3)
    first = rng.integers(0, VOCAB, 40).tolist()
    others = [first[:same] + rng.integers(0, VOCAB, 40 - same).tolist() for same in (4, 13, 20, 31)]
    engine = make_engine()
    for prompt in (first, *others, first):
        assert tokens(engine, [prompt]) == tokens(make_engine(), [prompt])
    assert engine.stats().prefix_hit_tokens == 16 + 16 + 32, "whole chunks are still reused"


def test_a_chunk_holds_a_block():
    with pytest.raises(UserError, match=r"max_num_batched_tokens=3: .* use at least 4"):
        make_engine(max_num_batched_tokens=3)


def test_at_most_32_requests_decode_at_once():
    engine = make_engine(2000, max_num_seqs=100, max_num_batched_tokens=64)
    tokens(engine, prompts(40, 6), 30)
    assert max(batch.num_requests for batch in engine._runner.steps) == 32


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 12), st.integers(0, 40)),
        min_size=1,
        max_size=8,
    ),
    st.integers(14, 60),
    st.integers(4, 24),
    st.integers(1, 8),
    st.booleans(),
)
def test_limits_never_change_tokens(asked, num_blocks, budget, max_num_seqs, reuse):
    """Boundaries stay the same; blocks, company and prefixes may be any."""
    batch = [
        [*np.random.default_rng(stem).integers(0, VOCAB, n).tolist()[:same], *range(same, n)]
        for stem, n, _, same in asked
    ]
    params = [SamplingParams(max_tokens=most, temperature=0.0) for _, _, most, _ in asked]
    engine = make_engine(
        num_blocks,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=reuse,
    )
    outputs = engine.generate(batch, params)
    for prompt, chosen, output in zip(batch, params, outputs, strict=True):
        alone = make_engine(max_num_batched_tokens=budget, max_num_seqs=1)
        assert output.token_ids == alone.generate([prompt], chosen)[0].token_ids
