"""Milliseconds of a decode step of an artifact, of one rank or of several, on random weights.

    python benchmarks/ranks_decode.py ARTIFACT [--batch 1,16,64] [--collectives NAME]

Prompts are random tokens. A figure is the median time between two tokens of all requests, with
everything that the engine does in between.
"""

import argparse
import statistics
import time

import numpy as np

from dsa_compile.runtime import Engine, SamplingParams

STEPS = 60


def step_ms(engine: Engine, batch: int, context: int) -> float:
    """The median over steps in which all requests decode."""
    generator = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=STEPS + 20, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = generator.integers(3, 100_000, context).tolist()
        engine.add_request(f"{batch}-{number}", prompt, params)
    times, before = [], time.perf_counter()
    while engine.has_unfinished():
        engine.step()
        now = time.perf_counter()
        times.append((now - before) * 1e3)
        before = now
    # prefill comes first and requests end one after the other: the steps in between
    return statistics.median(times[-STEPS:-8])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--collectives", default="nccl")
    args = parser.parse_args()
    began = time.perf_counter()
    with Engine.load(
        args.artifact,
        load_format="dummy",
        skip_tokenizer=True,
        max_running=64,
        max_batched_tokens=8192,
        max_model_len=16_384,
        collectives=args.collectives,
        enable_prefix_cache=False,
    ) as engine:
        print(f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
        for batch in map(int, args.batch.split(",")):
            print(
                f"batch {batch}: {step_ms(engine, batch, args.context):.3f} ms a step", flush=True
            )


if __name__ == "__main__":
    main()
