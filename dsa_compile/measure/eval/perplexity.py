"""Perplexity: how well a text is predicted, one token after another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from dsa_compile.measure.eval.probe import LanguageModel
from dsa_compile.measure.eval.progress import Tick, ignore
from dsa_compile.measure.eval.texts import Window


@dataclass(frozen=True)
class Perplexity:
    """Prediction of every token of a text but the first of each window.

    Attributes:
        selection: which keys were attended to.
        tokens: predicted.
        num_bytes: of UTF-8 that they stand for.
        nats: negative log-likelihood, summed.
    """

    selection: str
    tokens: int
    num_bytes: int
    nats: float

    @property
    def per_token(self) -> float:
        """exp of the mean loss of a token."""
        return _exp(self.nats / self.tokens)

    @property
    def per_byte(self) -> float:
        """exp of the loss per byte: comparable between tokenizers."""
        return _exp(self.nats / self.num_bytes)


def measure_perplexity(
    model: LanguageModel, windows: Sequence[Window], selection: str, tick: Tick = ignore
) -> Perplexity:
    """Score every window on its own, fp64 sums of fp32 log-probabilities.

    Args:
        model: the model.
        windows: at least one.
        selection: noted in the result.
        tick: called as the measurement goes on.
    """
    nats = 0.0
    for index, logits in enumerate(model.logits([window.ids for window in windows])):
        targets = torch.tensor(windows[index].ids[1:])
        losses = cross_entropy(logits[:-1], targets, reduction="none")
        nats += losses.double().sum().item()
        tick((index + 1) / len(windows))
    return Perplexity(
        selection=selection,
        tokens=sum(len(window.ids) - 1 for window in windows),
        num_bytes=sum(window.num_bytes for window in windows),
        nats=nats,
    )


def _exp(nats: float) -> float:
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf
