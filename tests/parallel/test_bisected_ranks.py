"""``bisect`` runs the ranks of an artifact for the CPU as an engine starts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dsa_compile.debugging.bisect.runtime_check import wrong_engine
from dsa_compile.debugging.recompiled_artifact import RecompiledArtifact
from dsa_compile.runtime import RequestOutput
from dsa_compile.runtime.ranks.gloo import GlooCommunicator


def opened(path: Path) -> RecompiledArtifact:
    return RecompiledArtifact.open(path, recorded_export=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2ep2"])
def test_healthy_ranks_are_right(artifact: Callable[[str], Path], layout: str) -> None:
    assert wrong_engine(opened(artifact(layout))) == ""


def test_a_rank_that_exchanges_wrongly_is_seen(
    artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank is this process, and its sums miss the other's part."""
    right = GlooCommunicator.all_reduce

    def halved(self: GlooCommunicator, x: Tensor, axis: str, ranks: int) -> Tensor:
        right(self, x, axis, ranks)
        return x.clone()

    monkeypatch.setattr(GlooCommunicator, "all_reduce", halved)
    assert "log-probability of token 1 is off by" in wrong_engine(opened(artifact("tp2")))


@pytest.mark.slow
def test_a_lane_that_scores_the_tokens_of_another_is_seen(
    artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recompiled = opened(artifact("dp2ep2"))
    right = RequestOutput.prompt_logprobs

    def of_another(self: RequestOutput) -> Any:
        return (right.fget(self) or [])[::-1]  # type: ignore[misc]

    monkeypatch.setattr(RequestOutput, "prompt_logprobs", property(of_another))
    assert "log-probabilities of other tokens" in wrong_engine(recompiled)
