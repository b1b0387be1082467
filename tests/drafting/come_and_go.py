"""Requests that come and go, and what an engine answers them, beside an engine without drafts."""

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from dsa_compile.runtime import Grammar, SamplingParams

# Steps one after another, the next launched before the tokens of one are known, and that at the
# sizes for which a GPU has graphs.
WAITING: dict[str, Any] = {}
AHEAD = {"async_scheduling": True}
PADDED = {"async_scheduling": True, "padded": True}
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
    (count, draft, mode), requests, num_blocks, max_num_batched_tokens, reuse = case
    engine = make_engine(
        count,
        draft,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=reuse,
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
