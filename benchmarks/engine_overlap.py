"""Wall time of decode steps on a GPU, beside the GPU's own time for them.

Steps overlap, or each is waited for. "gpu" is the time of a step's launches back to back, sampling
included: what a step costs when the GPU never waits. "host" is the part of a step in which the host
works rather than waits. Milliseconds a step.

    python benchmarks/engine_overlap.py ARTIFACT [--load-format dummy] [--requests 1 16 64]
"""

import argparse
import time

import numpy as np
import torch

from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.sampling.device_sampler import DeviceTokens


class Watch:
    """Notes the last step of a runner, and how long tokens are waited for."""

    def __init__(self, runner):
        self.waited, self.inputs, self.launch = 0.0, None, runner.launch
        wait = DeviceTokens.wait

        def timed(tokens):
            start = time.perf_counter()
            result = wait(tokens)
            self.waited += time.perf_counter() - start
            return result

        def noted(inputs):
            self.inputs = inputs
            return self.launch(inputs)

        DeviceTokens.wait = timed
        runner.launch = noted


def decoding(runner, requests, args, overlap):
    """An engine in which that many requests decode."""
    engine = Engine(
        runner,
        EngineOptions(
            max_num_seqs=max(args.requests),
            max_model_len=args.max_model_len,
            async_scheduling=overlap,
        ),
    )
    rng = np.random.default_rng(0)
    options = {"temperature": 0.7, "top_p": 0.9} if args.sampled else {"temperature": 0.0}
    for index in range(requests):
        prompt = rng.integers(3, runner.vocab_size, args.context).tolist()
        params = SamplingParams(max_tokens=args.steps + 99, seed=index, ignore_eos=True, **options)
        engine.add_request(f"r{index}", prompt, params)
    while len(engine.step()) < requests:
        pass
    for _ in range(10):
        engine.step()
    return engine


def wall_ms(engine, steps):
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - start) / steps * 1e3


def gpu_ms(watch, repeats=30):
    """The last step again and again, on the stream alone."""
    if not torch.cuda.is_available():
        return float("nan")
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        watch.launch(watch.inputs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sampled", action="store_true", help="draw with top-p")
    args = parser.parse_args()
    blocks = max(args.requests) * -(-args.max_model_len // 64)
    runner = load_runner(
        args.artifact,
        EngineOptions(
            num_gpu_blocks_override=blocks,
            load_format=args.load_format,
            max_num_seqs=max(args.requests),
            max_model_len=args.max_model_len,
        ),
    )
    watch = Watch(runner)
    print(f"{'requests':>8} {'overlap':>8} {'gpu':>8} {'host':>8} {'waiting':>8}")
    for requests in args.requests:
        engine = decoding(runner, requests, args, overlap=True)
        watch.waited = 0.0
        wall = wall_ms(engine, args.steps)
        host = wall - watch.waited / args.steps * 1e3
        engine.drain()
        gpu = gpu_ms(watch)
        waiting = wall_ms(decoding(runner, requests, args, overlap=False), args.steps)
        print(f"{requests:>8} {wall:8.3f} {gpu:8.3f} {host:8.3f} {waiting:8.3f}", flush=True)


if __name__ == "__main__":
    main()
