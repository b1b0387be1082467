"""Faults of drafting, one at a time, on scripted tokens and on the model's own drafts."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from dsa_compile.runtime.execution import draft_rows
from dsa_compile.runtime.sampling import host_choice
from dsa_compile.verify.bisect.draft_check import drafts_problem
from dsa_compile.verify.bisect.runtime_answers import Answers
from dsa_compile.verify.bisect.runtime_scenes import drafted_scenes
from dsa_compile.verify.execution.exact_runner import CheckedDrafts
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from tests.verify.drafting_check import DRAFTING, wrong_drafting

Patch = pytest.MonkeyPatch
BLOCK = 16


def few(recompiled: RecompiledArtifact) -> Answers:
    return Answers(recompiled, exact=True).of_few_layers()


def kept_behind_a_wrong_draft(patch: Patch) -> None:
    """Fault in the count of right drafts on the device."""

    def count(sampled: Tensor, drafts: Tensor, max_new: Tensor) -> Tensor:
        return 1 + (sampled[:, :-1] == drafts).long().sum(1).minimum(max_new - 1)

    patch.setattr(draft_rows, "count_right", count)


def kept_behind_a_wrong_draft_on_the_host(patch: Patch) -> None:
    """Fault in the count on the host, which goes on where a draft is wrong."""

    def goes_on(chosen: list[Any], token: Any, state: Any, drafts: Any, length: Any) -> bool:
        chosen.append(token)
        return len(chosen) <= len(drafts)

    patch.setattr(host_choice, "_goes_on", goes_on)


def no_draft_is_kept(patch: Patch) -> None:
    """Tokens are right, and drafting gains nothing."""
    right = draft_rows.count_right
    patch.setattr(draft_rows, "count_right", lambda *args: right(*args).clamp(max=1))


def deeper_one_too_far(patch: Patch) -> None:
    """A deeper draft's row is one position too far."""
    right = draft_rows.deeper_rows
    patch.setattr(
        draft_rows, "deeper_rows", lambda rows, depth, block: right(rows, depth + 1, block)
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kept_behind_a_wrong_draft, no_draft_is_kept, deeper_one_too_far])
def test_a_fault_of_planned_drafts_is_named(
    drafting: RecompiledArtifact, monkeypatch: Patch, fault: Callable[[Patch], None]
) -> None:
    fault(monkeypatch)
    found = wrong_drafting(few(drafting))
    assert found is not None
    assert found[0] == DRAFTING


def test_a_fault_of_drafts_that_are_looked_up_is_named(
    recompiled: RecompiledArtifact, monkeypatch: Patch
) -> None:
    """Also where the artifact has no draft plans."""
    assert wrong_drafting(few(recompiled)) is None
    kept_behind_a_wrong_draft_on_the_host(monkeypatch)
    found = wrong_drafting(few(recompiled))
    assert found is not None
    assert found[0] == DRAFTING


@pytest.mark.slow
def test_planned_drafts_are_those_of_the_finished_plans(
    drafting: RecompiledArtifact, monkeypatch: Patch
) -> None:
    assert wrong_drafting(few(drafting)) is None
    answers, spec = few(drafting), drafting.exported.spec
    assert not answers.measure([(3, 1, 4, 1, 5)])
    some = list(drafted_scenes(BLOCK, spec.index_topk, spec.vocab_size))
    assert [answers.problem(scene) for scene in some] == ["", ""]
    deeper_one_too_far(monkeypatch)
    assert answers.problem(some[0]).startswith("draft 2 behind token 1 is ")
    assert not answers.problem(some[0].without["drafting"](some[0]))


@pytest.mark.parametrize(
    ("chains", "checked", "problem"),
    [
        ({1: (7, 8), 3: (5, 6)}, {1: (7, 8), 3: (5, 6)}, ""),
        ({1: (7, 8)}, {1: (7, 9)}, "draft 2 behind token 1 is 9, not 8"),
        (None, {1: (7, 8), 2: (1, 1)}, "of the drafts behind token 1 0 are kept, not 1"),
        (None, {1: (1, 8), 3: (1, 1)}, "of the drafts behind token 1 1 are kept, not 0"),
        ({}, {1: ()}, "no draft was checked"),
        (None, {1: ()}, ""),
    ],
)
def test_what_is_kept_follows_from_the_drafts(
    chains: dict[int, tuple[int, ...]] | None,
    checked: dict[int, tuple[int, ...]],
    problem: str,
) -> None:
    ids = (3, 4, 7, 9, 5, 6, 2)  # a token of the prompt, and what followed
    made = [CheckedDrafts(end, tokens) for end, tokens in checked.items()]
    assert drafts_problem(ids, 1, chains, made) == problem
