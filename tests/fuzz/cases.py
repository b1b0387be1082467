"""Cases: which target, which seed, which of its mutations; and what they do to documents."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.fuzz.json_mutations import dump, mutate, mutate_text


@dataclass(frozen=True)
class Case:
    """A target, a seed, and which of the seed's mutations are made; repeatable.

    Attributes:
        steps: numbers of mutations; a finding is minimised by leaving some out.
    """

    target: str
    seed: int
    steps: tuple[int, ...]

    @classmethod
    def of(cls, target: str, seed: int) -> "Case":
        """The case of a seed, with all its mutations."""
        return cls(target, seed, tuple(range(random.Random(seed).choice((1, 1, 1, 2, 4)))))

    def rng(self, step: object = "all") -> random.Random:
        """Random numbers of one mutation, the same whether or not the others are made."""
        return random.Random(f"{self.target}:{self.seed}:{step}")

    def rngs(self) -> Iterator[random.Random]:
        """The random numbers of each mutation that is made."""
        return map(self.rng, self.steps)


class Finding(AssertionError):
    """Finding of an outcome that must not happen and is no exception by itself."""


def mutated(case: Case, document: Any) -> Any:
    for rng in case.rngs():
        document = mutate(document, rng)
    return document


def mutated_bytes(case: Case, data: bytes) -> bytes:
    """A JSON file changed in its structure, or now and then as text."""
    if case.rng().random() < 0.85:
        return dump(mutated(case, json.loads(data)))
    for rng in case.rngs():
        data = mutate_text(data, rng)
    return data
