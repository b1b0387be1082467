"""``bisect`` runs the ranks of an artifact for the CPU as an engine starts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dsa_compile.runtime.ranks import group
from dsa_compile.runtime.ranks.gloo import GlooCommunicator
from dsa_compile.runtime.sampling.draw_options import records_of as right
from dsa_compile.verify.bisect.runtime_check import ANY, wrong_engine
from dsa_compile.verify.bisect.runtime_scenes import OVERLAP
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


def opened(path: Path) -> RecompiledArtifact:
    return RecompiledArtifact.open(path, recorded_export=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2ep2"])
def test_healthy_ranks_are_right(artifact: Callable[[str], Path], layout: str) -> None:
    assert wrong_engine(opened(artifact(layout))) is None


@pytest.mark.slow
def test_a_rank_that_exchanges_wrongly_is_seen(
    artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank is this process, and its sums miss the other's part."""
    right = GlooCommunicator.all_reduce

    def halved(self: GlooCommunicator, x: Tensor, axis: str, ranks: int) -> Tensor:
        right(self, x, axis, ranks)
        return x.clone()

    monkeypatch.setattr(GlooCommunicator, "all_reduce", halved)
    found = wrong_engine(opened(artifact("tp2")))
    assert found is not None
    assert found[0] == ANY
    assert "log-probability of token 1 is off by" in found[1]


@pytest.mark.slow
def test_sampling_options_of_an_earlier_request_are_seen(
    artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are sent a row's options for its first request alone."""
    known: dict[int, Any] = {}

    def first(rows: Any, states: Any, counts: Any) -> Any:
        kept = [known.setdefault(row, state) for row, state in zip(rows, states, strict=True)]
        return right(rows, kept, counts)

    monkeypatch.setattr(group, "records_of", first)
    found = wrong_engine(opened(artifact("tp2")))
    assert found is not None
    assert found[0] == OVERLAP
    assert "which is not the finished graphs' likeliest" in found[1]
