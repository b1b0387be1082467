import math

import pytest
import torch

from dsa_compile.measure.eval.perplexity import Perplexity, measure_perplexity
from dsa_compile.measure.eval.texts import Window

VOCAB = 8


class Uniform:
    def logits(self, sequences, tails=None):
        for sequence in sequences:
            yield torch.zeros(len(sequence), VOCAB)


class Successor:
    """Gives the token after the last one, in the cycle of all tokens, these odds to one."""

    def __init__(self, odds):
        self.odds = odds

    def logits(self, sequences, tails=None):
        for sequence in sequences:
            following = (torch.tensor(sequence) + 1) % VOCAB
            yield torch.nn.functional.one_hot(following, VOCAB) * math.log(self.odds)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity():
    windows = [Window([0, 5, 1], 4), Window([2, 2, 2, 7], 5)]
    result = measure_perplexity(Uniform(), windows, "sparse")
    assert (result.tokens, result.num_bytes) == (5, 9)
    assert result.per_token == pytest.approx(VOCAB)
    assert result.per_byte == pytest.approx(VOCAB ** (5 / 9))


def test_each_token_is_judged_by_the_logits_before_it():
    # probability 9/16 for the successor, 1/16 for any other
    windows = [Window([3, 4, 5], 2), Window([6, 7, 1], 2)]
    ticks = []
    result = measure_perplexity(Successor(9), windows, "dense", ticks.append)
    assert result.nats == pytest.approx(3 * math.log(16 / 9) + math.log(16), rel=1e-6)
    assert result.selection == "dense"
    assert ticks == [0.5, 1.0]


def test_a_hopeless_model_overflows_to_infinity():
    assert Perplexity("sparse", 1, 1, 1e6).per_token == math.inf
