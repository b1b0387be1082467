"""Host time of one decode step: schedule, lay out the batch, commit. No model is run.

The default is 256 running requests with contexts of 1K to 8K tokens and blocks of 64. Prints the
median and the 99th percentile of each phase over the measured steps, in microseconds, and of
their sum; the requests cross block boundaries at different steps, so a step sees its share of
allocations and prefix-cache insertions.

    python benchmarks/scheduler_step.py [--requests 256] [--steps 1000] [--no-prefix-cache]

On a machine busy with other work, ``--cpu-time`` leaves out the time others had the core.
"""

import argparse
import gc
import time

import numpy as np

from dsa_compile.runtime.execution.batch import build_batch
from dsa_compile.runtime.requests.outputs import Completion
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.scheduler import Scheduler

PHASES = ("schedule", "build_batch", "commit", "total")


def running_scheduler(requests: int, block_size: int, steps: int, reuse: bool) -> Scheduler:
    """A scheduler whose requests have all been prefilled and decode for ``steps`` more steps."""
    rng = np.random.default_rng(0)
    contexts = rng.integers(1024, 8192, requests)
    num_blocks = int((-(-(contexts + 2 * steps) // block_size)).sum())
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=8192,
        max_num_seqs=requests,
        max_model_len=163_840,
        enable_prefix_caching=reuse,
    )
    scheduler = Scheduler(config)
    params = SamplingParams(max_tokens=2 * steps, temperature=0.0, ignore_eos=True)
    for index, context in enumerate(contexts.tolist()):
        prompt = rng.integers(0, 129_280, context).tolist()
        completion = Completion(params, (1,))
        scheduler.add(Request(f"request-{index}", prompt, params.max_tokens, completion))
    while True:
        entries, _ = one_step(scheduler)
        if len(entries) == requests and all(entry.num_tokens == 1 for entry in entries):
            return scheduler


def one_step(scheduler, now=time.perf_counter):
    """Schedule, lay out and commit one step; its entries and the seconds of each phase."""
    begin = now()
    step = scheduler.schedule()
    scheduled = now()
    build_batch(step)
    built = now()
    # What the sampler returns: made outside the measured phases.
    results = [[17] for entry in step.entries if entry.max_new]
    sampled = now()
    scheduler.commit(step, results)
    spent = (scheduled - begin, built - scheduled, now() - sampled)
    return step.entries, (*spent, sum(spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()

    scheduler = running_scheduler(
        args.requests, args.block_size, args.steps, not args.no_prefix_cache
    )
    gc.collect()
    gc.freeze()
    now = time.thread_time if args.cpu_time else time.perf_counter
    spent = []
    for _ in range(args.steps):
        entries, seconds = one_step(scheduler, now)
        assert len(entries) == args.requests
        spent.append(seconds)
    print(f"{args.requests} decoding requests, {args.steps} steps; microseconds per step")
    print(f"{'phase':<12} {'median':>8} {'p99':>8}")
    for phase, times in zip(PHASES, np.array(spent).T * 1e6, strict=True):
        print(f"{phase:<12} {np.median(times):8.0f} {np.percentile(times, 99):8.0f}")


if __name__ == "__main__":
    main()
