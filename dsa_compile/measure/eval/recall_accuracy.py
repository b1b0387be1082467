"""Recall accuracy: the share of facts that a model gives back to the last token, by distance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsa_compile.measure.eval.probe import LanguageModel
from dsa_compile.measure.eval.progress import Tick, ignore
from dsa_compile.measure.eval.recall import RecallPrompt


@dataclass(frozen=True)
class Recall:
    """Questions at one distance: how many were asked, how many answered right to the last token.

    ``distance`` is the intended one, in tokens; ``selection`` names how keys were chosen.
    """

    selection: str
    distance: int
    prompts: int
    correct: int

    @property
    def accuracy(self) -> float:
        """Share of the questions that were answered right."""
        return self.correct / self.prompts


def measure_recall(
    model: LanguageModel,
    prompts: Mapping[int, Sequence[RecallPrompt]],
    selection: str,
    tick: Tick = ignore,
) -> list[Recall]:
    """One :class:`Recall` a distance.

    The right answer is fed in and every token of it must be the likeliest one: it is then, token
    for token, what greedy generation gives.
    """
    asked = [prompt for group in prompts.values() for prompt in group]
    sequences = [prompt.ids + prompt.answer[:-1] for prompt in asked]
    right: list[bool] = []
    for logits in model.logits(sequences, [len(prompt.answer) for prompt in asked]):
        right.append(logits.argmax(-1).tolist() == asked[len(right)].answer)
        tick(len(right) / len(asked))
    marks = iter(right)
    return [
        Recall(selection, distance, len(group), sum(next(marks) for _ in group))
        for distance, group in prompts.items()
    ]
