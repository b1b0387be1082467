"""Tokens of a step with drafts: each row is sampled as without, up to the first wrong draft."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.runtime import SamplingParams
from dsa_compile.runtime.sampling.host_choice import choose_tokens, step_tokens
from dsa_compile.runtime.sampling.sampler import Sampler, SamplingState
from dsa_compile.runtime.scheduling.step import Failure

VOCAB = 23
END = 1


def state_of(**options):
    return SamplingState(SamplingParams(**options), [3, 4, 5, 5], (END,), VOCAB)


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.6, 1.5]),
        "seed": st.integers(0, 3),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "min_tokens": st.integers(0, 3),
        "logprobs": st.sampled_from([None, 2]),
        "logit_bias": st.sampled_from([None, {7: 2.0}]),
    }
)


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(OPTIONS, st.integers(0, 4), st.integers(0, 5)), min_size=1),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_of_single_rows(requests, seed):
    """Drafts agree with what one row after another gives, down to a place of its own."""
    generator = torch.Generator().manual_seed(seed)
    sampler = Sampler(VOCAB)
    rows, states, drafts, wanted = [], [], [], []
    for options, count, right in requests:
        logits = 2 * torch.randn(count + 1, VOCAB, generator=generator)
        alone, one_by_one = state_of(**options), []
        for row in logits:
            one_by_one.append(sampler.sample(row[None], [alone])[0])
            alone.append(one_by_one[-1].token_id)
        tokens = [choice.token_id for choice in one_by_one]
        guesses = [t if n < right else (t + 1) % VOCAB for n, t in enumerate(tokens[:-1])]
        ends = [n + 1 for n, token in enumerate(tokens) if token == END]
        rows.append(logits)
        states.append(state_of(**options))
        drafts.append(guesses)
        wanted.append(one_by_one[: min(right + 1, count + 1, *ends)])
    sizes = [len(part) for part in rows]
    chosen = choose_tokens(sampler, torch.cat(rows), states, sizes, drafts)
    assert chosen == wanted
    assert all(state.generated == 0 for state in states)


def test_a_row_that_fails_behind_right_drafts_is_left_to_the_next_step():
    logits = torch.zeros(3, VOCAB)
    logits[0, 7] = logits[2, 9] = 5.0
    logits[1, 2] = torch.nan
    choose = Sampler(VOCAB)
    (tokens,) = choose_tokens(choose, logits, [state_of(temperature=0.0)], [3], [[7, 9]])
    assert [token.token_id for token in tokens] == [7]
    (failed,) = choose_tokens(choose, logits[1:], [state_of(temperature=0.0)], [2], [[9]])
    (result,) = step_tokens([failed]).results
    assert isinstance(result, Failure)


def test_forced_lengths_count_whatever_the_drafts_are():
    logits = torch.zeros(3, VOCAB)
    logits[0, 7] = logits[1, 8] = logits[2, 9] = 5.0
    states = [state_of(temperature=0.0)]

    def tokens(length, rows=logits):
        (some,) = choose_tokens(Sampler(VOCAB), rows, states, [3], [[1, 8]], [length])
        return [token.token_id for token in some]

    assert [len(tokens(length)) for length in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert tokens(3) == [7, 8, 9]
    logits[1, 2] = torch.nan
    assert tokens(3) == [7]
    logits[1] = 0
    logits[1, END] = 5.0
    assert tokens(3) == [7, END]


def test_nothing_counts_behind_an_end_token():
    logits = torch.zeros(2, VOCAB)
    logits[0, END] = logits[1, 5] = 4.0
    (tokens,) = choose_tokens(Sampler(VOCAB), logits, [state_of(temperature=0.0)], [2], [[END]])
    assert [token.token_id for token in tokens] == [END]


@pytest.mark.parametrize("tokens", [[9], [9, 9, 3]])
def test_a_forked_state_leaves_the_first_as_it_was(tokens):
    state = state_of(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5)
    state.append(4)
    ids, counts = state.counts.ids.copy(), state.counts.counts.copy()
    other = state.fork()
    for token in tokens:
        other.append(token)
    assert state.generated == 1
    assert np.array_equal(state.counts.ids, ids)
    assert np.array_equal(state.counts.counts, counts)
    assert other.generated == 1 + len(tokens)
