"""Tokens a second with 0 to 4 drafts a step, one request at a time: runs of all, turn by turn.

    python benchmarks/drafting.py ARTIFACT --text FILE --rounds 5

The artifact is compiled with --draft mtp. Prompts are pieces of the text; answers are greedy, and
must be the same for every number of drafts.
"""

import argparse
import statistics
import time
from pathlib import Path

from dsa_compile.runtime import Engine, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    args = parser.parse_args()

    engines = {
        count: Engine.load(args.artifact, num_speculative_tokens=count, num_gpu_blocks_override=64)
        for count in args.drafts
    }
    ids = next(iter(engines.values())).tokenizer.encode(args.text.read_text()).ids
    step = len(ids) // args.prompts
    prompts = [ids[n * step : n * step + args.prompt_tokens] for n in range(args.prompts)]
    params = SamplingParams(max_tokens=args.max_tokens, temperature=0.0, ignore_eos=True)
    seconds: dict[int, list[float]] = {count: [] for count in engines}
    busy: dict[int, list[float]] = {count: [] for count in engines}
    answers = None
    for _ in range(args.rounds):
        for count, engine in engines.items():
            start, begun = time.perf_counter(), time.process_time()
            found = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
            seconds[count].append(time.perf_counter() - start)
            busy[count].append(time.process_time() - begun)
            answers = answers or found
            assert found == answers, f"{count} drafts a step give other tokens"
    tokens = args.prompts * args.max_tokens
    base, base_busy = (statistics.median(taken[args.drafts[0]]) for taken in (seconds, busy))
    print("drafts  accepted length  tokens/s, median (least, most)  against the first  in CPU time")
    for count, engine in engines.items():
        rates = sorted(tokens / taken for taken in seconds[count])
        middle = statistics.median(rates)
        print(
            f"{count:6}  {engine.stats().accepted_length:15.2f}  {middle:8.1f} "
            f"({rates[0]:.1f}, {rates[-1]:.1f})  {base / statistics.median(seconds[count]):21.2f}  "
            f"{base_busy / statistics.median(busy[count]):11.2f}"
        )


if __name__ == "__main__":
    main()
