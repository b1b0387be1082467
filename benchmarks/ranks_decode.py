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

from dsa_compile.measure.profiled import leave
from dsa_compile.measure.step.by_op import trace
from dsa_compile.measure.step.communication import Communication, communication
from dsa_compile.measure.step.timeline import on_device
from dsa_compile.runtime import Engine, SamplingParams

STEPS = 60
TRACED = 16


def start(engine: Engine, name: str, batch: int, context: int) -> None:
    """Bring so many requests to decoding, all at once: a prompt takes a step or two."""
    generator = np.random.default_rng(batch)
    while_prompts_run = batch + batch // 8
    params = SamplingParams(
        max_tokens=while_prompts_run + STEPS + 8, temperature=0.0, ignore_eos=True
    )
    for number in range(batch):
        prompt = generator.integers(3, 100_000, context).tolist()
        engine.add_request(f"{name}-{number}", prompt, params)
    while len(engine.step()) < batch:
        assert engine.has_unfinished(), "requests ended before all of them decoded"
    for _ in range(4):
        engine.step()


def step_ms(
    engine: Engine, batch: int, context: int, traced: bool
) -> tuple[float, Communication | None]:
    """The median over steps in which all requests decode, and communication in others if wanted."""
    start(engine, f"{batch}", batch, context)
    times, before = [], time.perf_counter()
    while len(engine.step()) == batch:
        now = time.perf_counter()
        times.append((now - before) * 1e3)
        before = now
    found = None
    finish(engine)
    if traced:
        start(engine, f"traced-{batch}", batch, context)

        def steps() -> None:
            for _ in range(TRACED):
                engine.step()

        found = communication(on_device(trace(steps)), TRACED)
        finish(engine)
    return statistics.median(times), found


def finish(engine: Engine) -> None:
    """Step until no request is left."""
    while engine.has_unfinished():
        engine.step()


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
        skip_tokenizer_init=True,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        max_model_len=16_384,
        collectives=args.collectives,
        enable_prefix_caching=False,
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
