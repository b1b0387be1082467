"""Batches: a mixture of natural text and recall documents that is a function of the step alone."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from examples.tiny_v32.recall import Filler, RecallWriter, common_words

_WORDS = 6000  # that keys and values are made of; rare ones are many tokens
_COMMON = 600  # of them, also found all over the text, so that they are easily confused


@dataclass(frozen=True)
class Mixture:
    """Mixture of documents in a batch; ``progress`` runs from 0 to 1 over the curriculum.

    ``hard``: half of all documents are recall, from further away, and about half of the words in
    keys and values are common ones.
    """

    batch_size: int
    length: int
    seed: str
    hard: bool = False

    def recall_share(self, progress: float) -> float:
        """Share of recall documents: large at first, then smaller, with more natural text."""
        return 0.5 if self.hard else 0.85 - 0.5 * min(progress / 0.6, 1.0)

    def vocabulary(self, words: list[str]) -> list[str]:
        """Words to draw from uniformly, made of all words in order of frequency."""
        repeats = len(words) // _COMMON if self.hard else 0
        return words + words[:_COMMON] * repeats

    @property
    def nearest(self) -> int:
        """Shortest distance of a question, where there is a fact that far back."""
        return 64 if self.hard else 8

    def reach(self, progress: float) -> int:
        """Distances grow from 64 tokens to the whole context over the first two fifths."""
        return int(64 * (self.length / 64) ** min(progress / 0.4, 1.0))

    def density(self, rng: random.Random, progress: float) -> float:
        """Density of facts: high at first, then anything from high to low."""
        sparse = 0.9 - 0.6 * min(progress / 0.4, 1.0)
        return rng.uniform(sparse, 0.9)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Step number to (int64 ids [B, length + 1], fp32 loss weights [B, length + 1]).

    Args:
        corpus: directory written by ``corpus.py``.
        mixture: what to draw.
        curriculum: steps until the curriculum is at its end.
    """

    def __init__(self, corpus: Path, mixture: Mixture, curriculum: int) -> None:
        self.stream = np.load(corpus / "train.npy")
        tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
        filler = Filler(self.stream, tokenizer)
        words = mixture.vocabulary(common_words(self.stream, tokenizer, _WORDS))
        self.writer = RecallWriter(tokenizer, filler, words)
        self.mixture, self.curriculum = mixture, max(curriculum, 1)

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        mixture, progress = self.mixture, min((step + 1) / self.curriculum, 1.0)
        rng = random.Random(f"{mixture.seed}/{step}")
        length = mixture.length + 1
        ids = np.zeros((mixture.batch_size, length), dtype=np.int64)
        weights = np.ones((mixture.batch_size, length), dtype=np.float32)
        recall = round(mixture.batch_size * mixture.recall_share(progress))
        for row in range(mixture.batch_size):
            if row < recall:
                density = mixture.density(rng, progress)
                ids[row], weights[row] = self.writer.document(
                    rng, length, (mixture.nearest, mixture.reach(progress)), density
                )
            else:
                start = rng.randrange(len(self.stream) - length)
                ids[row, 1:] = self.stream[start : start + length - 1]
        return torch.from_numpy(ids), torch.from_numpy(weights)
