"""Grammars: their limits, and the tokens that a bitmask leaves."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from dsa_compile.errors import ParameterError
from dsa_compile.runtime import Grammar, SamplingParams
from dsa_compile.runtime.sampling.grammar import GrammarCompiler, allowed_by, bitmasks_of
from dsa_compile.runtime.sampling.sampler import Sampler, SamplingState
from tests.trained import trained_model


class Allows:
    """Allows some tokens, as a compiled grammar does."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.taken: list[int] = []

    def fill(self, bitmask: np.ndarray, row: int) -> None:
        bitmask[row] = 0
        for token in self.tokens:
            bitmask.view(np.uint32)[row, token // 32] |= np.uint32(1 << token % 32)

    def append(self, token: int) -> None:
        self.taken.append(token)


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 100])
def test_a_bitmask_leaves_the_allowed_tokens(vocab_size: int) -> None:
    places, bitmasks = bitmasks_of([Allows(0, vocab_size - 1), None, Allows(3)], vocab_size)
    assert places == [0, 2]
    left = [allowed_by(bitmask, vocab_size).nonzero()[0].tolist() for bitmask in bitmasks]
    assert left == [[0, vocab_size - 1], [3]]


def test_the_sampler_keeps_to_the_grammar_and_its_neighbours_do_not() -> None:
    logits = torch.arange(40.0).repeat(2, 1)
    params = SamplingParams(temperature=0.0, logprobs=1)
    grammar = Allows(2, 7)
    held = SamplingState(params, [1], (), 40, grammar)
    free = SamplingState(params, [1], (), 40)
    chosen = Sampler(40).sample(logits, [held, free])
    assert [c.token_id for c in chosen] == [7, 39]
    assert chosen[0].logprob.rank == 33  # of the model's own distribution
    held.append(7)
    assert grammar.taken == [7]
    assert held.special
    assert not free.plain


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Grammar("regex", ""), "empty"),
        (lambda: Grammar("regex", "a" * 4097), "at most 4096"),
        (lambda: Grammar.choice("ab"), "1 to 1024"),
        (lambda: Grammar.choice([]), "1 to 1024"),
        (lambda: Grammar.choice(["a", 3]), "no text"),
        (lambda: Grammar.choice(["a"] * 1025), "1 to 1024"),
        (lambda: Grammar.json_schema({"enum": ["a" * 70000]}), "at most 65536"),
        (lambda: Grammar.json_schema({"enum": [float("nan")]}), "not JSON"),
        (lambda: Grammar("json_schema", "[" * 9999), "not JSON"),
        (lambda: Grammar.json_schema([]), "an object"),
        (lambda: Grammar.json_schema({"const": "\ud800"}), "UTF-8"),
        (lambda: Grammar("json_schema", '{"a":' * 65 + "1" + "}" * 65), "64 levels"),
        (lambda: SamplingParams(grammar="a"), "Grammar"),
        (lambda: SamplingParams(grammar=Grammar("regex", "a"), min_tokens=1), "min_tokens"),
        (lambda: GrammarCompiler(lambda: None, 9).compile(Grammar("regex", "a"), [1]), "tokenizer"),
        (lambda: GrammarCompiler(lambda: None, 9).compile(Grammar("regex", "a"), []), "end token"),
    ],
)
def test_what_is_refused(make, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        make()
    assert caught.value.param == "grammar"


def test_a_grammar_is_plain_data() -> None:
    grammar = Grammar.json_schema({"type": "object"})
    assert json.loads(grammar.text) == {"type": "object"}
    assert grammar == Grammar.json_schema({"type": "object"})
    assert hash(SamplingParams(grammar=grammar)) == hash(SamplingParams(grammar=grammar))


def test_a_grammar_that_gets_slower_and_slower_ends_all_its_requests() -> None:
    tokenizer = Tokenizer.from_file(str(trained_model() / "tokenizer.json"))
    compiler = GrammarCompiler(lambda: tokenizer, tokenizer.get_vocab_size())
    slow = Grammar("regex", "((((a{0,100}){0,100}){0,100}){0,100}){0,100}")
    begin = compiler.compile(slow, [1])
    one, other = begin(), begin()
    bitmask = np.zeros((1, tokenizer.get_vocab_size() // 32), np.int32)
    for _ in range(60):
        one.fill(bitmask, 0)
        one.append(tokenizer.token_to_id("a"))
    for state in (one, other, one.fork()):
        state.fill(bitmask, 0)
        assert not bitmask.any()
    with pytest.raises(ParameterError, match="ms a token"):
        compiler.compile(slow, [1])
    assert compiler.compile(Grammar("regex", "a{0,100}"), [1]) is not None
