"""Sending the requests of a serving benchmark at a rate, or as many at a time as wanted."""

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence

import aiohttp

from dsa_compile.measure.serve.client import Outcome, Target, send
from dsa_compile.measure.serve.workload import Sample


def arrival_times(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds after the start at which requests are sent.

    Gaps are of a gamma distribution, stretched so that the last request comes at ``count / rate``:
    of any seed the rate is the one wanted.

    Args:
        count: requests.
        rate: requests a second; infinity sends all at once.
        burstiness: shape of the distribution: 1 is a Poisson process, less comes in bursts, more
            evenly.
        rng: source of the gaps.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = [rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]
    times = list(itertools.accumulate(gaps))
    stretch = count / rate / times[-1] if times[-1] else 1.0
    return [at * stretch for at in times]


async def run_load(
    session: aiohttp.ClientSession,
    target: Target,
    samples: Sequence[Sample],
    times: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Send every request at its time, or later where too many are under way.

    Args:
        session: to send with.
        target: where to.
        samples: the requests.
        times: seconds after the start, ascending, one a request.
        max_concurrency: most requests under way; None for no limit.
        on_done: called with each outcome as it comes.

    Returns:
        An outcome for each sample, and the seconds that all took.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def one(sample: Sample) -> Outcome:
        arrived = time.perf_counter()
        async with places:
            outcome = await send(session, target, sample)
        outcome.queue_time = outcome.start_time - arrived
        on_done(outcome)
        return outcome

    began = time.perf_counter()
    tasks: list[asyncio.Task[Outcome]] = []
    for sample, at in zip(samples, times, strict=True):
        if (wait := began + at - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(sample)))
    outcomes = await asyncio.gather(*tasks)
    return outcomes, time.perf_counter() - began
