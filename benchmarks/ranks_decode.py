"""Milliseconds of a decode step of an artifact, of one rank or of several, on random weights.

    python benchmarks/ranks_decode.py ARTIFACT [--batch 1,16,64] [--collectives NAME] [--trace]

Prompts are random tokens. A figure is the median time between two tokens of all requests, with
everything that the engine does in between. With --trace the kernels of the first rank are traced in
further steps, and what collectives add to them is printed: how much of communication is hidden.
"""

import argparse
import statistics
import time

import numpy as np

from dsa_compile.bench.profiled import leave
from dsa_compile.bench.step.by_op import trace
from dsa_compile.bench.step.communication import Communication, communication
from dsa_compile.bench.step.timeline import on_device
from dsa_compile.runtime import Engine, SamplingParams

STEPS = 60
TRACED = 16


def step_ms(
    engine: Engine, batch: int, context: int, traced: bool
) -> tuple[float, Communication | None]:
    """The median over steps in which all requests decode, and communication in others if wanted."""
    generator = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=STEPS + 20, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = generator.integers(3, 100_000, context).tolist()
        engine.add_request(f"{batch}-{number}", prompt, params)
    times, before, found = [], time.perf_counter(), None
    while engine.has_unfinished():
        engine.step()
        now = time.perf_counter()
        times.append((now - before) * 1e3)
        before = now
    if traced:
        for number in range(batch):
            prompt = generator.integers(3, 100_000, context).tolist()
            engine.add_request(f"traced-{batch}-{number}", prompt, params)
        for _ in range(len(times) - STEPS):  # of the prompts, as before
            engine.step()

        def steps() -> None:
            for _ in range(TRACED):
                engine.step()

        found = communication(on_device(trace(steps)), TRACED)
        while engine.has_unfinished():
            engine.step()
    # prefill comes first and requests end one after the other: the steps in between
    return statistics.median(times[-STEPS:-8]), found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--collectives", default="nccl")
    parser.add_argument("--trace", action="store_true", help="print what collectives add to a step")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batch.split(",")]
    began = time.perf_counter()
    with Engine.load(
        args.artifact,
        load_format="dummy",
        skip_tokenizer=True,
        max_running=max(batches),
        max_batched_tokens=8192,
        max_model_len=16_384,
        collectives=args.collectives,
        enable_prefix_cache=False,
    ) as engine:
        print(f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
        for batch in batches:
            ms, found = step_ms(engine, batch, args.context, args.trace)
            print(f"batch {batch}: {ms:.3f} ms a step", flush=True)
            if found is not None:
                print(f"  {found}", flush=True)


if __name__ == "__main__":
    main()
    leave(0)
