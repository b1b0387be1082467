"""Key-value recall and multi-hop copying, hidden in natural text.

A *fact* binds a key to a value; a *query* asks for it some tokens later. Keys and values are one or
two common words, or words and digits, joined at random: only the context can tell the answer.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from examples.tiny_v32.tokenizer import ASSISTANT, EOS, SPECIAL, USER

# (fact, query, what follows the value). Every key and value has a space before it, so it has the
# same tokens wherever it stands.
FORMS = (
    ("The code of {k} is {v}.\n", "The code of {k} is", ".\n"),
    ("set {k} = {v}\n", "get {k} =", "\n"),
    ("# note: {k} -> {v}\n", "# recall: {k} ->", "\n"),
    ("Remember that {k} means {v}.\n", "Question: what does {k} mean? Answer:", ".\n"),
)
CHAT_QUERY = f"{USER}What is the code of {{k}}?{ASSISTANT}</think>"
_HOP = "trace {k} ->"
# The tokenizer's own split for the texts written here; a special token is a piece.
_PIECES = re.compile(r"<\S[^>]*>|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9<]+|\n| ")
_LAST_SPECIAL = len(SPECIAL) - 1

# Loss weights: a random word cannot be predicted, an answer must be.
_RANDOM, _PLAIN = 0.05, 0.5


@dataclass(frozen=True)
class Prompt:
    """A recall question: ``ids`` end where the value begins, ``answer`` are the value's tokens.

    ``distance`` counts the tokens from the value in the fact to the value to be given.
    """

    ids: list[int]
    answer: list[int]
    distance: int


@dataclass
class _Fact:
    key: str
    value: str
    end: int  # position after the fact's line
    then: str | None = None  # the value of the value, for a chain


class Filler:
    """Cuts pieces of whole lines out of a token stream."""

    def __init__(self, stream: NDArray[np.uint16], tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab()
        self.newline = vocabulary["Ċ"]
        breaks = [n for t, n in vocabulary.items() if t == "Ċ" * len(t)]
        ends = np.flatnonzero(np.isin(stream, breaks))
        special = np.flatnonzero(stream <= _LAST_SPECIAL)
        self.starts = np.setdiff1d(ends[:-1] + 1, special)
        self.stream = stream

    def cut(self, rng: random.Random, length: int) -> list[int]:
        """At most ``length`` >= 1 tokens from the start of a line, ending with a line end."""
        start = int(self.starts[rng.randrange(len(self.starts))])
        piece = self.stream[start : start + length - 1]
        piece = piece[piece > _LAST_SPECIAL]
        return [*piece.tolist(), self.newline]


class RecallWriter:
    """Writes training documents and test prompts."""

    def __init__(self, tokenizer: Tokenizer, filler: Filler, words: Sequence[str]) -> None:
        self.tokenizer, self.filler, self.words = tokenizer, filler, words
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids of ASCII ``text``, without a begin-of-sentence token."""
        ids: list[int] = []
        for piece in _PIECES.findall(text):
            if piece not in self._cache:
                self._cache[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += self._cache[piece]
        return ids

    def name(self, rng: random.Random) -> str:
        """A fresh key or value."""
        word = rng.choice(self.words)
        kind = rng.random()
        if kind < 0.4:
            return f"{word}_{rng.choice(self.words)}"
        return word if kind < 0.7 else f"{word}{rng.randrange(10, 100)}"

    def value(self, rng: random.Random) -> str:
        """A value: a name, or a number of 3 to 10 digits."""
        if rng.random() < 0.5:
            return self.name(rng)
        return "".join(rng.choices("0123456789", k=rng.randint(3, 10)))

    def document(
        self, rng: random.Random, length: int, reach: tuple[int, int], density: float
    ) -> tuple[list[int], list[float]]:
        """One training document of ``length`` tokens with loss weights.

        Args:
            rng: the source of everything random.
            length: tokens.
            reach: shortest and longest distance asked for, where there are such facts.
            density: share of facts and queries among the pieces, the rest is filler.
        """
        ids, weights = [0], [0.0]
        facts: list[_Fact] = []
        keys: set[str] = set()
        answer_weight = 4.0
        forms = rng.sample(FORMS, rng.choice((1, 2, len(FORMS))))

        def add(text: str, weight: float) -> None:
            tokens = self.encode(text)
            ids.extend(tokens)
            weights.extend([weight] * len(tokens))

        def state(key: str, value: str, then: str | None = None) -> None:
            head, middle, tail = _parts(rng.choice(forms)[0])
            for text, weight in (
                (head, _PLAIN), (" " + key, _RANDOM), (middle, _PLAIN),
                (" " + value, _RANDOM), (tail, _PLAIN),
            ):  # fmt: skip
                add(text, weight)
            keys.add(key)
            facts.append(_Fact(key, value, len(ids), then))

        def ask(fact: _Fact) -> None:
            _, query, tail = rng.choice(forms)
            hop = fact.then is not None
            head, after = (_HOP if hop else query).split(" {k}")
            add(head, _PLAIN)
            add(" " + fact.key, _RANDOM)
            add(after, _PLAIN)
            add(" " + fact.value, answer_weight)
            if fact.then is not None:
                add(" ->", answer_weight)
                add(" " + fact.then, answer_weight)
            add("\n" if hop else tail, _PLAIN)

        end_with_chat = rng.random() < 0.3
        room = length - (40 if end_with_chat else 0)
        while len(ids) < room:
            if rng.random() > density:
                ids += (piece := self.filler.cut(rng, rng.randint(8, 160)))
                weights += [1.0] * len(piece)
            elif not facts or rng.random() < 0.45:
                key, value = self.name(rng), self.value(rng)
                if key in keys:
                    continue
                if rng.random() < 0.15 and (middle := self.name(rng)) not in keys:
                    state(key, middle, then=value)
                    state(middle, value)
                else:
                    state(key, value)
            else:
                fact = _at_distance(facts, len(ids), _log_uniform(rng, *reach))
                if fact is not None:
                    facts.remove(fact)
                    ask(fact)
        if end_with_chat and facts:
            ids, weights = ids[:room], weights[:room]
            fact = _at_distance(facts, room, _log_uniform(rng, *reach)) or facts[-1]
            if fact.end <= room:
                head, after = CHAT_QUERY.split(" {k}")
                for text, weight in (
                    ("\n" + head, 0.1), (" " + fact.key, _RANDOM), (after, _PLAIN),
                    (" " + fact.value, answer_weight), (EOS, 1.0),
                ):  # fmt: skip
                    add(text, weight)
        while len(ids) < length:
            ids += (piece := self.filler.cut(rng, length - len(ids)))
            weights += [1.0] * len(piece)
        return ids[:length], weights[:length]

    def prompt(self, rng: random.Random, distance: int, density: float = 0.5) -> Prompt:
        """One question at about ``distance`` tokens (exact but for the shortest).

        A share ``density`` of the pieces around the fact are other facts.
        """
        key, value = self.name(rng), self.value(rng)
        fact, query, _ = rng.choice(FORMS)
        answer = self.encode(" " + value)
        question = self.encode(query.format(k=key))
        line = self.encode(fact.format(k=key, v=value))
        after = len(self.encode(_parts(fact)[2])) + len(answer) + len(question)
        between = self._fill(rng, distance - after, density, key)
        lead = self._fill(rng, rng.randint(32, 96), density, key)
        return Prompt([0, *lead, *line, *between, *question], answer, len(between) + after)

    def _fill(self, rng: random.Random, length: int, density: float, key: str) -> list[int]:
        """``length`` tokens of text and of facts about other keys than ``key``."""
        tokens: list[int] = []
        while (left := length - len(tokens)) > 0:
            line: list[int] = []
            if rng.random() < density and (other := self.name(rng)) != key:
                line = self.encode(rng.choice(FORMS)[0].format(k=other, v=self.value(rng)))
            if not 0 < len(line) <= left:
                line = self.filler.cut(rng, min(left, rng.randint(8, 48)))
            tokens += line
        return tokens


def common_words(stream: NDArray[np.uint16], tokenizer: Tokenizer, count: int) -> list[str]:
    """The most frequent lower-case words of 3 to 9 letters of (the start of) the text."""
    text = tokenizer.decode(stream[:3_000_000].tolist())
    frequency: dict[str, int] = {}
    for word in text.split():
        if 3 <= len(word) <= 9 and word.isascii() and word.isalpha() and word.islower():
            frequency[word] = frequency.get(word, 0) + 1
    return sorted(frequency, key=lambda w: (-frequency[w], w))[:count]


def _parts(fact: str) -> tuple[str, str, str]:
    head, rest = fact.split(" {k}")
    middle, tail = rest.split(" {v}")
    return head, middle, tail


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return float(low * (high / low) ** rng.random())


def _at_distance(facts: list[_Fact], here: int, distance: float) -> _Fact | None:
    """The fact whose distance is nearest to the wanted one."""
    return min(facts, key=lambda f: abs(here - f.end - distance), default=None)
