"""With drafts, whatever happens, an engine gives token for token what it gives without."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsa_compile.runtime import Grammar, SamplingParams
from tests.many_cases import many

# Steps one after another, the next launched before the tokens of one are known, and that at the
# sizes for which a GPU has graphs.
WAITING: dict[str, Any] = {}
AHEAD = {"overlap": True}
PADDED = {"overlap": True, "padded": True}
METHODS: list[tuple[int, str, dict[str, Any]]] = [
    *((k, "mtp", mode) for mode in (WAITING, AHEAD, PADDED) for k in (1, 2, 3, 4)),
    (3, "mtp", {"padded": True}),
    (3, "mtp", {**PADDED, "draft_max_rows": 2}),
    *((3, "mtp", {**mode, "deterministic": True}) for mode in (WAITING, PADDED)),
    *((k, "ngram", WAITING) for k in (1, 2, 3, 4)),
]
WORDS = Grammar("regex", "[a-z_]{2,9}( [a-z_]{1,9}){0,5}\\n")
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "min_tokens": 9, "ignore_eos": False},
    {"temperature": 0.0, "stop": ["self", "\n\n"]},
    {"temperature": 0.0, "logit_bias": {205: -5.0, 599: 2.0}},
    {"temperature": 0.0, "stop_token_ids": [205]},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 8, "min_p": 0.02, "logprobs": 2},
    {"temperature": 0.0, "grammar": WORDS, "ignore_eos": False},
    {"temperature": 0.6, "seed": 9, "grammar": WORDS, "ignore_eos": False},
]


@dataclass(frozen=True)
class Asked:
    """A request: ``shared`` text, a piece of the held-out text, and when it comes and goes.

    Those of one ``salt`` share prefixes; those of a lower ``priority`` run first.
    """

    start: int
    length: int
    shared: bool
    options: int
    max_tokens: int
    arrival: int
    abort: int | None
    priority: int = 0
    salt: str | None = None


REQUESTS = st.builds(
    Asked,
    start=st.integers(0, 9000),
    length=st.integers(1, 110),
    shared=st.booleans(),
    options=st.integers(0, len(OPTIONS) - 1),
    max_tokens=st.integers(1, 40),
    arrival=st.integers(0, 12),
    abort=st.none() | st.integers(1, 25),
    priority=st.integers(0, 2),
    salt=st.sampled_from([None, None, "other"]),
)
CASES = st.tuples(
    st.sampled_from(METHODS),
    st.lists(REQUESTS, min_size=1, max_size=7),
    st.integers(14, 50),  # blocks: seven requests of 150 tokens do not fit
    st.sampled_from([40, 64, 300]),  # tokens of a step: prompts come in chunks
    st.booleans(),
)


def prompt_of(asked: Asked, text: list[int]) -> list[int]:
    own = text[asked.start : asked.start + asked.length]
    return text[100:140] + own if asked.shared else own


def params_of(asked: Asked) -> SamplingParams:
    given = {"ignore_eos": True, **OPTIONS[asked.options]}
    if "min_tokens" in given:
        given["min_tokens"] = min(given["min_tokens"], asked.max_tokens)
    return SamplingParams(max_tokens=asked.max_tokens, **given)


def drive(engine, requests, text):
    """Run requests that come and go; their outputs in order."""
    outputs = {}
    steps = 0
    waiting = dict(enumerate(requests))
    while waiting or engine.has_unfinished():
        for number, asked in list(waiting.items()):
            if asked.arrival <= steps:
                del waiting[number]
                engine.add_request(
                    str(number),
                    prompt_of(asked, text),
                    params_of(asked),
                    priority=asked.priority,
                    cache_salt=asked.salt,
                )
        for number, asked in enumerate(requests):
            if asked.abort is not None and steps == asked.arrival + asked.abort:
                output = engine.abort(str(number))
                if output is not None:
                    outputs[str(number)] = output
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check()
        steps += 1
    return [outputs[str(number)] for number in range(len(requests))]


def check(make_engine, text, case):
    (count, draft, mode), requests, num_blocks, max_batched_tokens, reuse = case
    engine = make_engine(
        count,
        draft,
        num_blocks=num_blocks,
        max_batched_tokens=max_batched_tokens,
        enable_prefix_cache=reuse,
        **mode,
    )
    found = drive(engine, requests, text)
    assert engine.stats().owned_blocks == 0
    plain = make_engine(0, deterministic=mode.get("deterministic", False))
    wanted = plain.generate(
        [prompt_of(asked, text) for asked in requests], [params_of(asked) for asked in requests]
    )
    for asked, ours, theirs in zip(requests, found, wanted, strict=True):
        if ours.finish_reason == "abort":
            assert ours.token_ids == theirs.token_ids[: ours.num_tokens], asked
            continue
        assert ours.token_ids == theirs.token_ids, asked
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), asked
        if theirs.prompt_logprobs is not None:
            assert scored(ours) == scored(theirs), asked
        if theirs.logprobs is not None:
            ids = [entry.token_id for entry in ours.logprobs]
            assert ids == [entry.token_id for entry in theirs.logprobs], asked
    return engine.stats()


def scored(output):
    return [entry and entry.token_id for entry in output.prompt_logprobs]


SOME = settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)


@settings(SOME, max_examples=8)
@given(case=CASES)
def test_tokens_are_those_without_drafts(make_engine, text, case):
    check(make_engine, text, case)


@pytest.mark.slow
@settings(SOME, max_examples=many(50))
@given(case=CASES)
def test_tokens_are_those_without_drafts_many(make_engine, text, case):
    check(make_engine, text, case)


@pytest.mark.parametrize(
    "method", [(1, "mtp", PADDED), (3, "mtp", WAITING), (4, "mtp", AHEAD), (3, "ngram", WAITING)]
)
def test_a_crowded_engine_preempts_and_accepts(make_engine, text, method):
    """What the random cases may miss: this one preempts, reuses, selects keys and accepts."""
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
            for output in make_engine(count, max_batched_tokens=40).generate(prompts, params)
        ]
        for count in (0, 2)
    )
    assert found == wanted
