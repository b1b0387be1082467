"""``bisect`` runs the ranks of an artifact for the CPU as an engine starts them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.runtime import RequestOutput, SamplingParams
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.ranks.gloo import GlooCommunicator
from dsa_compile.runtime.ranks.messages import PlanWriter, StepPlan
from dsa_compile.runtime.sampling.sampler import Sampler, SamplingState
from dsa_compile.verify.bisect.drawn_tokens import drawn_problem
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
    right = PlanWriter.plan

    def plan(self: PlanWriter, inputs: StepInputs, number: int = 0) -> StepPlan:
        known = set(self._sent)
        made = right(self, inputs, number)
        new = [(place, s) for place, s in made.states if inputs.rows[place] not in known]
        return replace(made, states=new)

    monkeypatch.setattr(PlanWriter, "plan", plan)
    found = wrong_engine(opened(artifact("tp2")))
    assert found is not None
    assert found[0] == OVERLAP
    assert "which the finished graphs rule out" in found[1]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_token_may_be_drawn_where_rounding_explains_it(temperature: float) -> None:
    rows = torch.randn(1, 64, dtype=torch.float64).log_softmax(-1)
    params = SamplingParams(temperature=temperature, seed=3)
    state = SamplingState(params, (), (), 64)
    token = Sampler(64).sample(rows.float(), [state])[0].token_id
    assert drawn_problem([token], params, rows, 1e-4) == ""
    assert "token 1 is" in drawn_problem([(token + 9) % 64], params, rows, 1e-4)
    assert drawn_problem([(token + 9) % 64], params, rows, 10.0) == ""


@pytest.mark.slow
def test_a_lane_that_scores_the_tokens_of_another_is_seen(
    artifact: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recompiled = opened(artifact("dp2ep2"))
    right = RequestOutput.prompt_logprobs

    def of_another(self: RequestOutput) -> Any:
        return (right.fget(self) or [])[::-1]  # type: ignore[misc]

    monkeypatch.setattr(RequestOutput, "prompt_logprobs", property(of_another))
    found = wrong_engine(recompiled)
    assert found is not None
    assert "log-probabilities of other tokens" in found[1]
