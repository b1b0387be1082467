"""With drafts, whatever happens, an engine gives token for token what it gives without."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.runtime import SamplingParams
from tests.many_cases import many

from .come_and_go import AHEAD, OPTIONS, PADDED, REQUESTS, SOME, WAITING, Asked, check

METHODS: list[tuple[int, str, dict[str, Any]]] = [
    *((k, "mtp", mode) for mode in (WAITING, AHEAD, PADDED) for k in (1, 2, 3, 4)),
    (3, "mtp", {"padded": True}),
    (3, "mtp", {**PADDED, "draft_max_rows": 2}),
    *((3, "mtp", {**mode, "deterministic": True}) for mode in (WAITING, PADDED)),
    *((k, "ngram", WAITING) for k in (1, 2, 3, 4)),
]
CASES = st.tuples(
    st.sampled_from(METHODS),
    st.lists(REQUESTS, min_size=1, max_size=7),
    st.integers(14, 50),  # blocks: seven requests of 150 tokens do not fit
    st.sampled_from([40, 64, 300]),  # tokens of a step: prompts come in chunks
    st.booleans(),
)


@pytest.mark.slow
@settings(SOME, max_examples=8)
@given(case=CASES)
def test_tokens_are_those_without_drafts(make_engine, text, case):
    check(make_engine, text, case)


@pytest.mark.slow
@settings(SOME, max_examples=many(50))
@given(case=CASES)
def test_tokens_are_those_without_drafts_many(make_engine, text, case):
    check(make_engine, text, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [(1, "mtp", PADDED), (3, "mtp", WAITING), (4, "mtp", AHEAD), (3, "ngram", WAITING)]
)
def test_a_crowded_engine_preempts_and_accepts(make_engine, text, method):
    """Case that the random ones may miss: it preempts, reuses, selects keys and accepts."""
    requests = [
        Asked(700 * n, 40 + 9 * n, True, n % 5, 36, 2 * n, None if n else 6) for n in range(5)
    ]
    stats = check(make_engine, text, (method, requests, 18, 64, True))
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert sum(stats.accepted) > 0
    assert len(stats.drafted) == method[0]


@pytest.mark.parametrize("requests", [5, 7])
def test_rows_of_nobody_change_no_tokens(make_engine, text, requests):
    """Prompts of one token make a decode step at once, which is padded to 6 or 8 requests."""
    asked = [Asked(n, 1, False, n % 2, 12, 0, None) for n in range(1, requests + 1)]
    for method in [(1, "mtp", PADDED), (3, "mtp", {"padded": True})]:
        check(make_engine, text, (method, asked, 40, 300, False))


@pytest.mark.slow
@pytest.mark.parametrize("method", [(3, "mtp", WAITING), (3, "mtp", PADDED), (3, "ngram", WAITING)])
def test_a_deterministic_engine_gives_its_tokens(make_engine, text, method):
    prompts = [*(text[500 * n : 500 * n + 30 + n] for n in range(4)), [602]]
    params = [SamplingParams(max_tokens=24, ignore_eos=True, **OPTIONS[n]) for n in (0, 1, 2, 3, 1)]
    count, draft, mode = method
    found = make_engine(count, draft, deterministic=True, **mode).generate(prompts, params)
    wanted = make_engine(0, deterministic=True).generate(prompts, params)
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]


@pytest.mark.parametrize("method", [(0, None), (3, "mtp")])
def test_a_deterministic_engine_gives_the_same_bits_in_company(make_engine, text, method):
    prompts = [text[:40], text[500:530], [602], text[900:905]]
    params = SamplingParams(max_tokens=10, temperature=0.0, logprobs=2, ignore_eos=True)
    company = make_engine(*method, deterministic=True).generate(prompts, params)
    for prompt, found in zip(prompts, company, strict=True):
        (alone,) = make_engine(0, deterministic=True).generate([prompt], params)
        assert [entry.top for entry in found.logprobs] == [entry.top for entry in alone.logprobs]


def test_prompts_are_scored_alike(make_engine, text):
    prompts = [text[100:190], text[700:710]]
    params = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=2)
    wanted, found = (
        [
            (output.token_ids, [(entry.token_id, entry.rank) for entry in output.prompt_logprobs])
            for output in make_engine(count, max_num_batched_tokens=40).generate(prompts, params)
        ]
        for count in (0, 2)
    )
    assert found == wanted
