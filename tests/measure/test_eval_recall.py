import random

import pytest
import torch
from tokenizers import Tokenizer

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.recall import FORMS, RecallGenerator, common_words
from dsa_compile.measure.eval.recall_accuracy import measure_recall

WORDS = ["quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards", "bring"]
TEXT = "\n".join(f"{WORDS[n % 10]} and then more words follow on this line" for n in range(60))
VOCAB = 258


@pytest.fixture(scope="module")
def generator(model_dir):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False).ids

    return RecallGenerator(encode, TEXT, lead=[0])


@pytest.mark.parametrize("distance", [90, 200, 1000])
def test_the_value_stands_where_the_distance_says(generator, distance):
    for seed in range(20):
        prompt = generator.prompt(random.Random(seed), distance)
        assert prompt.ids[0] == 0
        start = len(prompt.ids) - prompt.distance
        assert prompt.ids[start : start + len(prompt.answer)] == prompt.answer
        assert prompt.distance == distance
        assert len(prompt.ids) + len(prompt.answer) <= generator.longest(distance)


def test_a_distance_too_small_for_the_question_becomes_the_nearest(generator):
    prompt = generator.prompt(random.Random(0), 5)
    start = len(prompt.ids) - prompt.distance
    assert 5 < prompt.distance < 100
    assert prompt.ids[start : start + len(prompt.answer)] == prompt.answer


def test_prompts_depend_on_the_seed_alone(generator):
    first, again, other = (generator.prompts([100, 200], 3, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    # asking for less gives the same prompts
    assert generator.prompts([200], 2, 1)[200] == first[200][:2]


def test_the_answer_is_in_no_other_fact_of_the_same_key(generator, model_dir):
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    for seed in range(20):
        prompt = generator.prompt(random.Random(seed), 400)
        text = tokenizer.decode(prompt.ids)
        query = next(q for _, q in FORMS if text.rpartition("\n")[2].startswith(q.split(" {k}")[0]))
        fact = next(f for f, q in FORMS if q == query)
        head, tail = query.split(" {k}")
        key = text.rpartition("\n")[2].removeprefix(head + " ").removesuffix(tail)
        opening = fact.partition("{v}")[0].format(k=key)
        assert text.count(opening) == 1


def test_text_without_words_is_refused():
    with pytest.raises(UserError, match="lower-case English words"):
        RecallGenerator(lambda text: list(text.encode()), "1 2 3\n4 5 6\n", [])


def test_common_words_come_by_frequency():
    assert common_words("two one two it THREE three. three, two one") == ["two", "one"]


def test_the_forms_are_those_the_example_trains_on():
    example = pytest.importorskip("examples.tiny_v32.recall")
    assert [(fact, query) for fact, query, *_ in example.FORMS] == list(FORMS)


class Reader:
    """Looks the last line's key up in the ``memory`` tokens before the token it is at.

    Answers like a copying model: it finds the latest earlier place with the same 12 tokens, and
    gives what followed there.
    """

    def __init__(self, memory):
        self.memory = memory

    def logits(self, sequences, tails=None):
        for sequence, tail in zip(sequences, tails, strict=True):
            yield torch.stack(
                [
                    self._next(sequence[:end])
                    for end in range(len(sequence) - tail + 1, len(sequence) + 1)
                ]
            )

    def _next(self, ids):
        logits = torch.zeros(VOCAB)
        seen = ids[-self.memory :]
        for size in range(12, 2, -1):
            for start in range(len(seen) - size - 1, -1, -1):
                if seen[start : start + size] == seen[-size:]:
                    logits[seen[start + size]] = 1.0
                    return logits
        return logits


def oracle_prompts(distances, count=5):
    """Facts of one form, whose question repeats the words before the value."""
    generator = RecallGenerator(lambda text: list(text.encode()), TEXT, [])
    prompts = {}
    for distance in distances:
        prompts[distance] = []
        seed = 0
        while len(prompts[distance]) < count:
            prompt = generator.prompt(random.Random(f"{distance}/{seed}"), distance)
            seed += 1
            if bytes(prompt.ids).decode().rpartition("\n")[2].startswith("The code of"):
                prompts[distance].append(prompt)
    return prompts


def test_recall_is_what_the_memory_reaches():
    prompts = oracle_prompts([100, 300, 600])
    ticks = []
    results = measure_recall(Reader(400), prompts, "recent", ticks.append)
    assert [(r.distance, r.prompts, r.correct) for r in results] == [
        (100, 5, 5), (300, 5, 5), (600, 5, 0),
    ]  # fmt: skip
    assert [r.accuracy for r in results] == [1.0, 1.0, 0.0]
    assert {r.selection for r in results} == {"recent"}
    assert ticks[-1] == 1.0


def test_every_token_of_the_answer_must_be_right():
    prompts = oracle_prompts([100], count=3)

    class LastWrong(Reader):
        def logits(self, sequences, tails=None):
            for logits in super().logits(sequences, tails):
                logits[-1] = -logits[-1]
                yield logits

    (result,) = measure_recall(LastWrong(400), prompts, "sparse")
    assert result.correct == 0
