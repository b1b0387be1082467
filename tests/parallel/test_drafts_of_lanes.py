"""Lanes that draft give the tokens of one process without drafts, whatever each of them does.

Ranks are threads here, but for one run of processes over gloo; both run the same steps.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_compile.artifact.reader import Artifact
from dsa_compile.measure.eval.texts import HELD_OUT
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.loading.peers import Alone
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.prompts import load_tokenizer
from tests.drafting.come_and_go import AHEAD, PADDED, REQUESTS, SOME, WAITING, check
from tests.many_cases import many

from .conftest import LAYOUTS
from .threads import group_of_threads

BLOCKS, BLOCK_SIZE, ROWS = 64, 16, 8
LAYOUT = "dp2ep2"
OTHERS = ["dp2", "tp2dp2"]
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def tokenizer(artifact) -> Any:
    return load_tokenizer(Artifact.open(artifact("one")))


@pytest.fixture(scope="module")
def text(tokenizer) -> list[int]:
    """Token ids of the example's held-out text."""
    ids: list[int] = tokenizer.encode(HELD_OUT.read_text()[:60_000]).ids
    return ids


def sizes(runner: Any, draft_max_rows: int | None) -> GraphPlan:
    """Sizes that a GPU has graphs for."""
    return GraphPlan.of(
        max_num_seqs=ROWS,
        max_model_len=runner.max_model_len,
        block_size=BLOCK_SIZE,
        topk=runner.short_context,
        num_drafts=runner.num_drafts,
        draft_max_rows=draft_max_rows,
    )


@pytest.fixture(scope="module")
def make_engine(artifact, tokenizer) -> Iterator[MakeEngine]:
    """``make_engine(k, draft, layout=…, num_blocks=…, **options)``: an engine over threads, or with
    ``k=0`` of one process; it closes the one before."""
    made: list[Engine] = []

    @cache
    def runner(name: str, rank: int, **options: Any) -> Any:
        given = EngineOptions(num_gpu_blocks_override=BLOCKS, max_num_seqs=ROWS, **options)
        return load_runner(artifact(name), given, Alone(rank))

    def make(
        count: int,
        draft: str | None = None,
        *,
        layout: str = LAYOUT,
        num_blocks: int = BLOCKS,
        padded: bool = False,
        force_accept: float | None = None,
        **options: Any,
    ) -> Engine:
        if not count:
            options.pop("deterministic", None)
            return Engine(runner("one", 0), EngineOptions(**options), tokenizer)
        while made:
            made.pop().close()
        shape = LAYOUTS[layout]
        drafts = {
            "num_speculative_tokens": count, "draft": draft, "force_accept": force_accept
        }  # fmt: skip
        of_ranks = [copy(runner(f"{layout}-mtp", rank, **drafts)) for rank in range(shape.world)]
        for each in of_ranks:
            each.num_blocks = num_blocks
            each.pad_to(sizes(each, options.get("draft_max_rows")) if padded else None)
        group = group_of_threads(of_ranks, shape, ROWS)
        chosen = EngineOptions(max_num_seqs=ROWS, **drafts, **options)
        made.append(Engine(group, chosen, tokenizer))
        return made[-1]

    yield make
    while made:
        made.pop().close()


METHODS: list[tuple[int, str, dict[str, Any]]] = [
    *((k, "mtp", mode) for mode in (WAITING, AHEAD) for k in (1, 3, 4)),
    (3, "mtp", PADDED),
    *((3, "mtp", {**mode, "draft_max_rows": 2}) for mode in (AHEAD, PADDED)),
    (3, "ngram", WAITING),
]


def cases(layouts: list[str], most: int) -> st.SearchStrategy:
    methods = [
        (k, draft, {**mode, "layout": layout}) for k, draft, mode in METHODS for layout in layouts
    ]
    return st.tuples(
        st.sampled_from(methods),
        st.lists(REQUESTS, min_size=1, max_size=most),
        st.integers(14, 40),  # blocks of a lane
        st.sampled_from([40, 64, 300]),
        st.booleans(),
    )


@pytest.mark.slow
@settings(SOME, max_examples=6)
@given(case=cases([LAYOUT], 8))
def test_tokens_are_those_without_drafts(make_engine, text, case) -> None:
    check(make_engine, text, case)


@pytest.mark.slow
@settings(SOME, max_examples=many(40))
@given(case=cases([LAYOUT, *OTHERS], 12))
def test_tokens_are_those_without_drafts_many(make_engine, text, case) -> None:
    check(make_engine, text, case)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **options)


def tokens(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    return [output.token_ids for output in engine.generate(prompts, params)]


def drafts_of(output: RequestOutput) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    return output.token_ids, output.drafted, output.accepted


class Widths:
    """The most tokens that a request may yield in each lane's step, 0 of no request, by step."""

    def __init__(self, engine: Engine) -> None:
        self.found: list[tuple[int, ...]] = []
        group = engine._runner
        self._right, group._plans = group._plans, self._plans

    def _plans(self, *args: Any) -> list[Any]:
        plans = self._right(*args)
        self.found.append(tuple(max(plan.inputs.max_new, default=0) for plan in plans))
        return plans


def met(engine: Engine) -> list[list[Any]]:
    """The collectives of each rank."""
    group = engine._runner
    threads = [other.process for other in group._others]
    return [group._communicator.met, *(thread._communicator.met for thread in threads)]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
def test_as_many_drafts_are_right_as_on_one_rank(make_engine, text, count: int) -> None:
    """Whatever pads a step of a lane, its drafts see the states of their own request."""
    prompts = [text[300 * n : 300 * n + 20 + 27 * n] for n in range(5)]
    params = [greedy(20 + 3 * n) for n in range(5)]
    found = make_engine(count, max_num_batched_tokens=64).generate(prompts, params)
    wanted = make_engine(count, layout="one").generate(prompts, params)
    assert list(map(drafts_of, found)) == list(map(drafts_of, wanted))
    assert sum(sum(output.accepted) for output in found) > 0


@pytest.mark.parametrize("mode", [WAITING, AHEAD, PADDED], ids=["waiting", "ahead", "padded"])
def test_a_lane_without_requests_meets_one_that_drafts(make_engine, text, mode) -> None:
    """Requests go to the lanes in turn; those of the second are aborted while they draft."""
    engine = make_engine(3, **mode)
    widths = Widths(engine)
    prompts = [text[500 * n : 500 * n + 30] for n in range(6)]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, greedy(20))
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        if (4, 4) in widths.found:
            for number in "135":
                engine.abort(number)
        outputs |= {output.request_id: output for output in engine.step()}
    assert widths.found.count((4, 0)) > 2
    wanted = make_engine(0).generate([prompts[n] for n in (0, 2, 4)], greedy(20))
    assert [outputs[n].token_ids for n in "024"] == [output.token_ids for output in wanted]
    assert engine.stats().owned_blocks == 0
    first, second = met(engine)
    assert first == second


def test_lanes_draft_as_deep_as_each_has_tokens_left(make_engine, text) -> None:
    """In steps of one lane with four drafts, the other has none, one, two or three."""
    engine = make_engine(4)
    widths = Widths(engine)
    prompts = [text[400 * n : 400 * n + 25] for n in range(2)]
    for left in range(2, 6):
        params = [greedy(30), greedy(left)]
        assert tokens(engine, prompts, params) == tokens(make_engine(0), prompts, params)
    assert {(5, 0), (5, 1), (5, 2), (5, 3), (5, 4)} <= set(widths.found)


@pytest.mark.parametrize("mode", [AHEAD, PADDED], ids=["ahead", "padded"])
def test_one_lane_has_too_many_requests_to_draft(make_engine, text, mode) -> None:
    """``draft_max_rows`` is of a lane: three requests draft nothing while two of the other lane do,
    and when one of them has ended they draft."""
    engine = make_engine(3, draft_max_rows=2, **mode)
    widths = Widths(engine)
    prompts = [text[350 * n : 350 * n + 20 + n] for n in range(5)]
    params = [greedy(count) for count in (6, 20, 30, 20, 30)]
    assert tokens(engine, prompts, params) == tokens(make_engine(0), prompts, params)
    assert {(1, 4), (4, 0)} <= set(widths.found)


def test_drafts_are_the_same_whoever_chooses(make_engine, text) -> None:
    """The host or the device, where lanes check no drafts, one and three in one step."""
    prompts = [text[350 * n : 350 * n + 20 + n] for n in range(5)]
    counts = (6, 20, 30, 20, 30)
    found = []
    for logprobs in (None, 0):
        engine = make_engine(3, draft_max_rows=2, enable_prefix_caching=False)
        params = [greedy(count) for count in counts[:-1]]
        outputs = engine.generate(prompts, [*params, greedy(counts[-1], logprobs=logprobs)])
        found.append(list(map(drafts_of, outputs)))
    assert found[0] == found[1]
    assert sum(sum(accepted) for _, _, accepted in found[0]) > 0


def test_the_host_chooses_for_all_lanes(make_engine, text) -> None:
    """One request asks for log-probabilities, in the second lane; those of its prompt, too."""
    prompts = [text[600 * n : 600 * n + 40 + 9 * n] for n in range(4)]
    params = [greedy(14), greedy(18, logprobs=2, prompt_logprobs=1), greedy(12), greedy(15)]
    for draft in ("mtp", "ngram"):
        found = make_engine(3, draft, max_num_batched_tokens=40).generate(prompts, params)
        wanted = make_engine(0).generate(prompts, params)
        assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
        for kind in ("logprobs", "prompt_logprobs"):
            ours, theirs = (getattr(outputs[1], kind) for outputs in (found, wanted))
            assert [e and e.token_id for e in ours] == [e and e.token_id for e in theirs]
            assert [e.logprob for e in ours if e] == pytest.approx(
                [e.logprob for e in theirs if e], abs=1e-3
            )


@pytest.mark.parametrize("logprobs", [None, 0], ids=["on the device", "on the host"])
def test_steps_of_lanes_keep_the_average(make_engine, text, logprobs) -> None:
    engine = make_engine(3, force_accept=2.5)
    prompts = [text[200 * n : 200 * n + 15] for n in range(3)]
    for output in engine.generate(prompts, greedy(51, logprobs=logprobs)):
        assert sum(output.accepted) / output.drafted[0] == pytest.approx(1.5, abs=0.1)
