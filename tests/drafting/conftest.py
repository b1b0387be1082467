"""The trained example with its draft plans, and engines over it that share one load."""

from collections.abc import Callable
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.artifact.reader import Artifact
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.texts import HELD_OUT
from dsa_compile.runtime import Engine, EngineOptions
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.requests.prompts import load_tokenizer
from tests.trained import trained_model

BLOCKS = 200
BLOCK_SIZE = 16

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafting") / "mtp"
    compile_model(trained_model(), path, draft="mtp", block_size=BLOCK_SIZE, records=False)
    return path


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact without draft plans."""
    path = tmp_path_factory.mktemp("plain") / "artifact"
    compile_model(trained_model(), path, layers=(4, 4), records=False)
    return path


@pytest.fixture(scope="session")
def loaded(artifact: Path) -> LoadedArtifact:
    return LoadedArtifact.open(artifact)


@pytest.fixture(scope="session")
def tokenizer(artifact: Path) -> Any:
    return load_tokenizer(Artifact.open(artifact))


@pytest.fixture(scope="session")
def text(tokenizer: Any) -> list[int]:
    """Token ids of the example's held-out text."""
    ids: list[int] = tokenizer.encode(HELD_OUT.read_text()[:60_000]).ids
    return ids


def sizes(runner: Any, draft_max_rows: int | None) -> GraphPlan:
    return GraphPlan.of(
        max_num_seqs=8,
        max_model_len=runner.max_model_len,
        block_size=BLOCK_SIZE,
        topk=runner._topk,
        deterministic=runner._deterministic,
        num_drafts=runner.num_drafts,
        draft_max_rows=draft_max_rows,
    )


@pytest.fixture(scope="session")
def make_engine(artifact: Path, tokenizer: Any) -> MakeEngine:
    """``make_engine(k, draft, num_blocks=…, **options)``: an engine with caches of its own size.

    ``padded``: decode steps have the sizes that a GPU has graphs for.
    """

    @cache
    def runner(count: int, draft: str | None, deterministic: bool) -> Any:
        drafts = {"num_speculative_tokens": count, "draft": draft, "deterministic": deterministic}
        return load_runner(
            artifact, EngineOptions(num_gpu_blocks_override=BLOCKS, max_num_seqs=8, **drafts)
        )

    def make(
        count: int,
        draft: str | None = None,
        *,
        num_blocks: int = BLOCKS,
        padded: bool = False,
        **options: Any,
    ):
        smaller = copy(runner(count, draft, options.get("deterministic", False)))
        smaller.num_blocks = num_blocks
        if padded:
            smaller.pad_to(sizes(smaller, options.get("draft_max_rows")))
        drafts = {"num_speculative_tokens": count, "draft": draft}
        return Engine(smaller, EngineOptions(max_num_seqs=8, **drafts, **options), tokenizer)

    return make
