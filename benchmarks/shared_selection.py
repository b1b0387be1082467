"""Drafts that are right, by depth, where deeper drafts select their keys and where they do not.

    python benchmarks/shared_selection.py ARTIFACT --text FILE

Where they do not, they attend to what the first draft of their chain selected, as GLM-5.2's do.
Drafts are made by plain calls of the ops, both ways along the same greedy answers, so any model
with a multi-token-prediction layer can be measured. The last column is the largest difference
of a draft's normed state between the two, on average.
"""

import argparse
from pathlib import Path

import torch
from plain_drafter import Drafter, FinalNorm, chain_matches

from dsa_compile.measure.eval.hf_agreement import generate_greedily
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()

    loaded = LoadedArtifact.open(args.artifact)
    ids = loaded.tokenizer.encode(args.text.read_text()).ids
    runner, norm = loaded.runner(), FinalNorm(loaded)
    print(f"index_topk {loaded.spec.index_topk}")
    print("context  depth  chains  own selection  shared  states differ by")
    for context in args.contexts:
        step = (len(ids) - context) // args.prompts
        prompts = [ids[n * step : n * step + context] for n in range(args.prompts)]
        right = torch.zeros(2, args.depth, dtype=torch.long)
        apart = torch.zeros(args.depth)
        chains = 0
        with torch.inference_mode():
            answers = generate_greedily(runner, prompts, args.max_tokens)
            for prompt, answer in zip(prompts, answers, strict=True):
                states = []
                for way, shared in enumerate((False, True)):
                    longest = context + args.max_tokens
                    drafter = Drafter(loaded, longest, args.depth, shared_selection=shared)
                    found, after = chain_matches(runner, drafter, norm, prompt, answer)
                    right[way] += found.cumprod(0).sum(1)
                    states.append(after)
                chains += found.shape[1]
                apart += (states[0] - states[1]).abs().amax(-1).sum(1)
        for depth in range(args.depth):
            own, shared = (f"{100 * int(count) / chains:.1f} %" for count in right[:, depth])
            print(
                f"{context:7}  {depth + 1:5}  {chains:6}  {own:>13}  {shared:>6}  "
                f"{float(apart[depth]) / chains:16.3f}"
            )


if __name__ == "__main__":
    main()
