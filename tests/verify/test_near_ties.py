"""A layer is not accused for a row in which two experts tie; for any other row it is."""

from dataclasses import replace

import pytest
import torch

from dsa_compile.verify.comparison.near_ties import noisy, steady_rows
from dsa_compile.verify.execution.exact import WIDE, ExactTensor, numbers
from dsa_compile.verify.execution.stages import run_stage
from dsa_compile.verify.execution.traces import HIDDEN, Trace
from dsa_compile.verify.inputs import reference
from dsa_compile.verify.inputs.prompt import Prompt
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


def test_rows_that_noise_turns_are_unsteady() -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=WIDE)
    x[:, 0] = x[:, 0].sign()
    x[5] = torch.tensor([1.0, 1.0, 1, 1, 1, 1, 1, 1 + 1e-12])  # of two equals the larger decides

    def layer(rows: torch.Tensor) -> torch.Tensor:
        return torch.where(rows[:, :1] < rows[:, 7:], rows, -rows)

    again = [layer(numbers(noisy(ExactTensor(x, torch.float32), seed))) for seed in range(8)]
    assert (~steady_rows(layer(x), again, 1e-4)).nonzero().tolist() == [[5]]
    assert steady_rows(layer(x), [-layer(x)], 1e-4).all()  # all of them: not left out


@pytest.fixture(scope="module")
def prompt(recompiled: RecompiledArtifact) -> Prompt:
    return recompiled.prompt(tokens=40)


def with_row(trace: Trace, index: int, row: torch.Tensor) -> Trace:
    """Another last row in what a layer is given."""
    calls = list(trace.calls)
    given = calls[index].inputs[0][HIDDEN]
    wide = numbers(given).clone()
    wide[0, -1] = row
    new = {HIDDEN: ExactTensor(wide, given.dtype)}
    calls[index] = replace(calls[index], inputs=[new, *calls[index].inputs[1:]])
    return replace(trace, calls=calls)


def test_an_expert_that_ties_is_not_a_wrong_layer(
    recompiled: RecompiledArtifact, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input's last row is moved to where another expert is taken, to the last bits."""
    trace = reference.transformers_trace(recompiled, prompt)
    stage = reference._exported_stage(recompiled)
    index = next(i for i, call in enumerate(stage.plan.calls) if call.kind == "moe")
    rows = numbers(trace.calls[index].inputs[0][HIDDEN])[0]
    ends = [rows[-1], rows[-2]]

    def result(row: torch.Tensor) -> torch.Tensor:
        given = with_row(trace, index, row)
        return numbers(run_stage(stage, prompt, given=given).calls[index].outputs[0][HIDDEN])

    made = [result(row) for row in ends]
    for _ in range(44):  # halve the way until its ends are neighbours that a choice divides
        middle = (ends[0] + ends[1]) / 2
        here = result(middle)
        nearer = int((here - made[0]).norm() > (here - made[1]).norm())
        ends[nearer], made[nearer] = middle, here
    assert (made[0] - made[1]).norm() > 1e3 * (ends[0] - ends[1]).norm()
    tied = with_row(trace, index, ends[0])
    outputs = tied.calls[index].outputs

    def returned(first: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [{HIDDEN: ExactTensor(first, outputs[0][HIDDEN].dtype)}, *outputs[1:]]

    tied.calls[index].outputs = returned(made[1])
    monkeypatch.setattr(reference, "transformers_trace", lambda *_: tied)
    layer = stage.plan.calls[index].layer
    assert reference.compare_with_transformers(recompiled, prompt)[layer].error < reference.LIMIT

    wrong = made[1].clone()
    wrong[0, 3] *= 1.01  # a row without a tie
    tied.calls[index].outputs = returned(wrong)
    assert reference.compare_with_transformers(recompiled, prompt)[layer].error > reference.LIMIT
