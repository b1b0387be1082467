"""Key-value recall: prompts that state facts in a text and ask for one of them later.

Keys and values are common words joined at random, so nothing but the context tells the answer. The
generator knows no tokenizer: it is given a function from text to token ids. The forms, and how keys
and values are made, are those of ``examples/tiny_v32``, whose model is trained on them.
"""

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsa_compile.errors import UserError

Encode = Callable[[str], list[int]]

# (fact, query). The answer goes on from the query, a space before it.
FORMS = (
    ("The code of {k} is {v}.\n", "The code of {k} is"),
    ("set {k} = {v}\n", "get {k} ="),
    ("# note: {k} -> {v}\n", "# recall: {k} ->"),
    ("Remember that {k} means {v}.\n", "Question: what does {k} mean? Answer:"),
)
_WORD = re.compile(r"(?<!\S)[a-z]{3,9}(?!\S)")
_WORDS = 600  # as many as the example's training draws from
_LEAD = (32, 96)  # tokens before the fact asked for
_PIECE = (8, 48)  # tokens of text in a piece
_DENSITY = 0.5  # share of the pieces that are other facts


@dataclass(frozen=True)
class RecallPrompt:
    """A question.

    Attributes:
        ids: the prompt, ending where the answer begins.
        answer: the tokens of the answer.
        distance: tokens from the value's first token in the fact to the answer's first token.
    """

    ids: list[int]
    answer: list[int]
    distance: int


class RecallGenerator:
    """Writes prompts.

    Args:
        encode: text to token ids, adding no special tokens.
        filler: natural text to hide the facts in.
        lead: ids that every prompt begins with, such as a begin token; may be empty.

    Raises:
        UserError: the filler has too few common words to make keys of.
    """

    def __init__(self, encode: Encode, filler: str, lead: Sequence[int]) -> None:
        self._encode = encode
        self._lead = list(lead)
        self._lines = [line + "\n" for line in filler.splitlines() if line.strip()]
        self._words = common_words(filler)
        self._newline = encode("\n")
        self._known: dict[str, list[int]] = {}
        if len(self._words) < 2:
            raise UserError(
                "recall prompts are made of lower-case English words, and the text has too few; "
                "give another text, or leave recall out with --only"
            )

    def prompts(
        self, distances: Sequence[int], count: int, seed: int
    ) -> dict[int, list[RecallPrompt]]:
        """``count`` prompts at about each distance; a function of the arguments alone."""
        return {
            distance: [
                self.prompt(random.Random(f"{seed}/{distance}/{number}"), distance)
                for number in range(count)
            ]
            for distance in distances
        }

    def prompt(self, rng: random.Random, distance: int) -> RecallPrompt:
        """One question, the fact ``distance`` tokens back, or as near as the shortest allows.

        Half of the pieces around the fact are facts about other keys.
        """
        fact, query = rng.choice(FORMS)
        key, value = self._name(rng), self._value(rng)
        answer = self._ids(f" {value}")
        line = self._ids(fact.format(k=key, v=value))
        question = self._ids(query.format(k=key))
        before_value = len(self._ids(fact.partition(" {v}")[0].format(k=key)))
        near = len(line) - before_value + len(question)
        between = self._fill(rng, distance - near, key)
        lead = self._fill(rng, rng.randint(*_LEAD), key)
        return RecallPrompt(
            [*self._lead, *lead, *line, *between, *question], answer, near + len(between)
        )

    def longest(self, distance: int) -> int:
        """No prompt at ``distance``, its answer included, has more tokens than this."""
        return distance + _LEAD[1] + 64

    def _fill(self, rng: random.Random, length: int, key: str) -> list[int]:
        """``length`` tokens of text and of facts about other keys than ``key``."""
        tokens: list[int] = []
        while (left := length - len(tokens)) > 0:
            piece: list[int] = []
            if rng.random() < _DENSITY and (other := self._name(rng)) != key:
                piece = self._encode(rng.choice(FORMS)[0].format(k=other, v=self._value(rng)))
            if not 0 < len(piece) <= left:
                piece = self._cut(rng, min(left, rng.randint(*_PIECE)))
            tokens += piece
        return tokens

    def _cut(self, rng: random.Random, length: int) -> list[int]:
        """``length`` tokens of consecutive lines, the last one cut and ended."""
        start = rng.randrange(len(self._lines))
        tokens: list[int] = []
        while len(tokens) < length:
            tokens += self._ids(self._lines[start % len(self._lines)])
            start += 1
        return (tokens[: max(length - len(self._newline), 0)] + self._newline)[:length]

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._encode(text)
        return self._known[text]

    def _name(self, rng: random.Random) -> str:
        word, kind = rng.choice(self._words), rng.random()
        if kind < 0.4:
            return f"{word}_{rng.choice(self._words)}"
        return word if kind < 0.7 else f"{word}{rng.randrange(10, 100)}"

    def _value(self, rng: random.Random) -> str:
        if rng.random() < 0.5:
            return self._name(rng)
        return "".join(rng.choices("0123456789", k=rng.randint(3, 10)))


def common_words(text: str) -> list[str]:
    """The most frequent lower-case ASCII words of 3 to 9 letters, most frequent first."""
    counts = Counter(_WORD.findall(text))
    return sorted(counts, key=lambda word: (-counts[word], word))[:_WORDS]
