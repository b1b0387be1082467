"""A closed loop of requests through an engine: times to the first token and between tokens."""

import statistics
import time
from dataclasses import dataclass

import numpy as np

from dsa_compile.runtime import Engine, SamplingParams

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Load:
    """Requests that begin together.

    Attributes:
        concurrency: how many.
        prompt_tokens: of each; random ids.
        new_tokens: that each generates, 2 or more.
    """

    concurrency: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class Served:
    """Times of a load.

    Attributes:
        ttft_ms: median over requests, from the beginning of all to the first token.
        tpot_ms: mean time between the steps in which all requests decode.
        steps: so many of these.
        seconds: from the beginning to the last token of all.
    """

    ttft_ms: float
    tpot_ms: float
    steps: int
    seconds: float


def serve(engine: Engine, load: Load) -> Served:
    """Run a load.

    Args:
        engine: idle, with room for all requests at once, and without a prefix cache.
        load: the requests.

    Raises:
        RequestError: a request does not fit.
        DeviceLost: the GPU failed, or a rank.
    """
    generator = np.random.default_rng(load.concurrency)
    params = SamplingParams(max_tokens=load.new_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    for number in range(load.concurrency):
        prompt = generator.integers(3, engine.vocab_size, load.prompt_tokens).tolist()
        engine.add_request(f"load-{number}", prompt, params)
    first: dict[str, float] = {}
    decoding: list[float] = []  # times of one step after the other
    before: float | None = None
    while engine.has_unfinished():
        outputs = engine.step()
        now = time.perf_counter()
        all_decode = len(outputs) == load.concurrency and all(o.num_tokens > 1 for o in outputs)
        if all_decode and before is not None:
            decoding.append((now - before) * 1e3)
        before = now if all_decode else None
        for output in outputs:
            first.setdefault(output.request_id, (now - began) * 1e3)
    seconds = time.perf_counter() - began
    ttft, tpot = statistics.median(first.values()), statistics.mean(decoding)
    return Served(ttft, tpot, len(decoding), seconds)


def warm_up(engine: Engine, concurrency: int) -> None:
    """Run a few short requests, so that nothing happens for the first time later."""
    serve(engine, Load(concurrency, _WARM_UP_TOKENS, _WARM_UP_TOKENS))
