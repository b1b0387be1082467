"""Host time of one decode step of the engine: what the GPU may not wait for. No model is run.

A step is scheduled, laid out, launched and committed, and its outputs are made, as with a model
whose steps overlap; the launches themselves (the model's graph, the sampler's kernel) are left out.
Prints the median and the 99th percentile in microseconds for some numbers of requests, each with
its slowest parts if ``--profile`` is given.

    python benchmarks/engine_step.py [--requests 1 32 256] [--steps 500] [--sampled] [--cpu-time]

On a machine busy with other work, ``--cpu-time`` leaves out the time others had the core.
"""

import argparse
import cProfile
import gc
import pstats
import time

import numpy as np
import torch

from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.sampling.device_sampler import DeviceSampler

VOCAB = 129_280


class NullRunner:
    """A model that computes nothing."""

    num_blocks = 40_000
    block_size = 64
    vocab_size = VOCAB
    max_model_len = 163_840
    eos_token_ids = (1,)
    num_drafts = 0
    num_lanes = 1
    overlaps = True

    def __init__(self, rows):
        self.rows_ahead = rows
        self.step_counts = {}
        self.sampler = DeviceSampler(VOCAB, torch.zeros(rows, dtype=torch.int64))
        self.sampler._sample = lambda logits, slot, start: slot.tokens.fill_(17)
        self.logits = torch.zeros(0, VOCAB)

    def samples_ahead(self, states):
        return self.sampler.takes(states)

    def launch(self, inputs):
        return self.sampler.launch(self.logits, inputs)


def running_engine(requests, steps, sampled):
    """An engine whose requests have all been prefilled."""
    engine = Engine(
        NullRunner(requests),
        EngineOptions(max_num_seqs=requests, max_num_batched_tokens=8192, async_scheduling=True),
    )
    rng = np.random.default_rng(0)
    options = {"temperature": 0.7, "top_p": 0.9} if sampled else {"temperature": 0.0}
    params = SamplingParams(max_tokens=2 * steps, ignore_eos=True, **options)
    for index, context in enumerate(rng.integers(1024, 8192, requests).tolist()):
        engine.add_request(f"r{index}", rng.integers(0, VOCAB, context).tolist(), params)
    while len(engine.step()) < requests:
        pass
    return engine


def measure(requests, args):
    engine = running_engine(requests, args.steps, args.sampled)
    now = time.thread_time if args.cpu_time else time.perf_counter
    gc.collect()
    gc.freeze()
    profile = cProfile.Profile() if args.profile else None
    spent = []
    for _ in range(args.steps):
        if profile is not None:
            profile.enable()
        begin = now()
        outputs = engine.step()
        new = [output.new_token_ids for output in outputs]
        spent.append((now() - begin) * 1e6)
        if profile is not None:
            profile.disable()
        assert len(new) == requests
    print(f"{requests:>8} {np.median(spent):8.0f} {np.percentile(spent, 99):8.0f}")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(16)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--sampled", action="store_true", help="draw, rather than take the argmax")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    print(f"{'requests':>8} {'median':>8} {'p99':>8}   microseconds of a step")
    for requests in args.requests:
        measure(requests, args)


if __name__ == "__main__":
    main()
