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
from dsa_compile.evaluation.texts import HELD_OUT
from dsa_compile.runtime import Engine, EngineOptions
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.loading.peers import Alone
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
    """Those that a GPU has graphs for."""
    return GraphPlan.of(
        max_running=ROWS,
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
    def runner(name: str, count: int, draft: str | None, rank: int) -> Any:
        options = EngineOptions(
            num_blocks=BLOCKS, max_running=ROWS, num_speculative_tokens=count, draft=draft
        )
        return load_runner(artifact(name), options, Alone(rank))

    def make(
        count: int,
        draft: str | None = None,
        *,
        layout: str = LAYOUT,
        num_blocks: int = BLOCKS,
        padded: bool = False,
        **options: Any,
    ) -> Engine:
        if not count:
            options.pop("deterministic", None)
            return Engine(runner("one", 0, None, 0), EngineOptions(**options), tokenizer)
        while made:
            made.pop().close()
        shape = LAYOUTS[layout]
        of_ranks = [copy(runner(f"{layout}-mtp", count, draft, r)) for r in range(shape.world)]
        for each in of_ranks:
            each.num_blocks = num_blocks
            each.pad_to(sizes(each, options.get("draft_max_rows")) if padded else None)
        group = group_of_threads(of_ranks, shape, ROWS)
        chosen = EngineOptions(
            max_running=ROWS, num_speculative_tokens=count, draft=draft, **options
        )
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


@settings(SOME, max_examples=6)
@given(case=cases([LAYOUT], 8))
def test_tokens_are_those_without_drafts(make_engine, text, case) -> None:
    check(make_engine, text, case)


@pytest.mark.slow
@settings(SOME, max_examples=many(40))
@given(case=cases([LAYOUT, *OTHERS], 12))
def test_tokens_are_those_without_drafts_many(make_engine, text, case) -> None:
    check(make_engine, text, case)
