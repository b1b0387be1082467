"""Tokens a second of an engine without a server, so many requests at a time.

    python benchmarks/offline_load.py ARTIFACT [--load-format dummy] [--concurrency 64,256]

As many requests run as the concurrency says; a new one comes when one ends. Prompts are random
tokens. Compare with a server under ``aiperf profile --concurrency N --request-count 4N``.
"""

import argparse
import time

import numpy as np

from dsa_compile.runtime import Engine, SamplingParams


def output_rate(engine: Engine, running: int, total: int, input_len: int, output_len: int) -> float:
    """Output tokens a second of ``total`` requests, ``running`` at a time."""
    generator = np.random.default_rng(total)
    prompts = generator.integers(3, 1000, (total, input_len)).tolist()
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    sent = done = 0
    begin = time.perf_counter()
    while done < total:
        while sent < total and sent - done < running:
            engine.add_request(f"{total}-{sent}", prompts[sent], params)
            sent += 1
        done += sum(output.finished for output in engine.step())
    return total * output_len / (time.perf_counter() - begin)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--concurrency", default="64,256")
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)
    args = parser.parse_args()
    lengths = args.random_input_len, args.random_output_len
    with Engine.load(
        args.artifact, load_format=args.load_format, skip_tokenizer_init=True
    ) as engine:
        for running in map(int, args.concurrency.split(",")):
            output_rate(engine, running, running, *lengths)  # a round that does not count
            rate = output_rate(engine, running, 4 * running, *lengths)
            print(f"{running} requests at a time: {rate:.0f} output tokens/s", flush=True)


if __name__ == "__main__":
    main()
