"""First drafts that are right in sampled answers, beside what rejection sampling would accept.

    python benchmarks/drawn_drafts.py ARTIFACT --text FILE --temperature 0.7

The artifact is compiled with --draft mtp, for the CPU. A draft is drawn with the random number of
the token that it stands for, and is right if it is that token. Rejection sampling would accept a
draft of distribution q where the model's is p with probability sum(min(p, q)): the mean over all
tokens of the answers, also those that no step drafted, as the step before gave two.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from dsa_compile.measure.eval.draft_chains import chains_of
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.runtime import Engine, SamplingParams


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """As they are drawn from."""
    return (logits.float() / temperature).softmax(-1)


@torch.inference_mode()
def expected(
    loaded: LoadedArtifact, answers: list[tuple[list[int], list[int]]], temperature: float
) -> tuple[float, int]:
    """The mean of sum(min(p, q)) over the first drafts of all answers, and their number."""
    drafts = chains_of(loaded, max(len(prompt) + len(answer) for prompt, answer in answers))
    total, count = 0.0, 0
    for prompt, answer in answers:
        logits, first = drafts.along((*prompt, *answer))
        # The state at a position and the token behind it give a draft of the one behind that.
        places = slice(len(prompt) - 1, len(prompt) + len(answer) - 2)
        q = probabilities(first["logits"], temperature)[places]
        p = probabilities(logits, temperature)[1:][places]
        total += float(torch.minimum(p, q).sum())
        count += len(p)
    return total / count, count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()

    loaded = LoadedArtifact.open(args.artifact)
    ids = loaded.tokenizer.encode(args.text.read_text(encoding="utf-8")).ids
    size = args.prompt_tokens
    prompts = [ids[number * 4 * size :][:size] for number in range(args.prompts)]
    params = [
        SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, seed=seed, ignore_eos=True
        )
        for seed in range(len(prompts))
    ]
    with Engine.load(
        args.artifact, num_speculative_tokens=1, num_gpu_blocks_override=256
    ) as engine:
        outputs = engine.generate(prompts, params)
        stats = engine.stats()
    share = stats.accepted[0] / stats.drafted[0]
    answers = [
        (prompt, list(output.token_ids)) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    rejection, count = expected(loaded, answers, args.temperature)
    print(f"right, same random number: {100 * share:.1f} % of {stats.drafted[0]} drafts")
    print(f"rejection sampling, expected: {100 * rejection:.1f} % at {count} places")


if __name__ == "__main__":
    main()
