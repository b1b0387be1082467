"""How far the answers of an engine that rounds may be from the finished graphs'."""

from typing import Any

import pytest
import torch

from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.verify.bisect.answer import Answer
from dsa_compile.verify.bisect.runtime_answers import MARGIN, Answers
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

PROMPT = (3, 1, 4, 1, 5)
ROUNDING = 0.01


@pytest.mark.parametrize(("off", "problem"), [(0.9, ""), (1.1, "token 1 is off by")])
def test_what_rounding_does_to_any_row_is_allowed_to_answers(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch, off: float, problem: str
) -> None:
    """Rows of answers are few, and an engine may run the variant in which others are rounded.

    Judged by their own rounding alone, answers of Mistral-Large-4 in bf16 were called wrong.
    """

    def logits(self: Answers, steps: Any, store: Any = None) -> torch.Tensor:
        made = torch.tensor([[0.5, 0.5]]).log().repeat(len(PROMPT), 1)
        if store is not None:
            made[steps.places[0][0]] += torch.tensor([ROUNDING, -ROUNDING])
        return made

    def plain(self: Answers, *args: Any, **options: Any) -> list[Answer]:
        found = logits(self, None)[0, 0].item() + off * MARGIN * ROUNDING
        return [Answer((0,), (TokenLogprobs(0, found, 1, ()),))]

    monkeypatch.setattr(Answers, "logits", logits)
    monkeypatch.setattr(Answers, "plain", plain)
    found = Answers(recompiled, exact=False).measure([PROMPT])
    assert problem in found
    assert bool(found) == bool(problem)
