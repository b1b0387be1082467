"""Write recall questions as JSON lines, for the tasks of lm-eval in this folder.

    python examples/lm_eval/recall_items.py demo/recall.jsonl --items 20

Each line has a prompt that states facts and asks for one of them, the answer, and four choices of
which ``label`` is the index of the right one.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import Tokenizer

from dsa_compile.measure.eval.recall import RecallGenerator

MODEL = Path(__file__).parents[1] / "tiny_v32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="FILE")
    parser.add_argument("--items", type=int, default=20, metavar="N")
    parser.add_argument("--distance", type=int, default=128, metavar="TOKENS")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(MODEL / "checkpoint" / "tokenizer.json"))
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")

    def encode(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False).ids

    generator = RecallGenerator(encode, text, [])
    distance = options.distance
    questions = generator.prompts([distance], options.items, seed=0)[distance]
    answers = [tokenizer.decode(question.answer).strip() for question in questions]
    with options.output.open("w", encoding="utf-8") as out:
        for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            rng = random.Random(number)
            others = sorted({other for other in answers if other != answer})
            choices = [answer, *rng.sample(others, 3)]
            rng.shuffle(choices)
            item = {
                "prompt": tokenizer.decode(question.ids),
                "answer": answer,
                "choices": choices,
                "label": choices.index(answer),
            }
            out.write(json.dumps(item, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
