"""Metrics of a serving benchmark, under the names of ``vllm bench serve``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsa_compile.common.names import one_of
from dsa_compile.errors import UserError
from dsa_compile.measure.serve.client import Outcome

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Metric:
    """A time that is reported as mean, median and percentiles.

    Attributes:
        name: in keys of the result.
        label: in printed lines.
        title: above them.
    """

    name: str
    label: str
    title: str


METRICS = (
    Metric("ttft", "TTFT", "Time to First Token"),
    Metric("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    Metric("itl", "ITL", "Inter-token Latency"),
    Metric("e2el", "E2EL", "End-to-end Latency"),
    Metric("client_queue_time", "Client Queue Time", "Client-side Queueing"),
)


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``["ttft:200", "tpot:20"]`` as milliseconds by metric.

    Raises:
        UserError: a pair is none, or its metric is not one of :data:`GOODPUT_METRICS`.
    """
    found = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        one_of("metric of --goodput", name, GOODPUT_METRICS)
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if not limit >= 0:
            raise UserError(f"--goodput {pair}: should be NAME:MILLISECONDS")
        found[name] = limit
    return found


def summarize(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float],
    goodput: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures of a run; times of failed requests count nowhere.

    Args:
        outcomes: of all requests.
        duration: seconds of the run, > 0.
        percentiles: of every metric, in [0, 100].
        goodput: most milliseconds by metric that a good request takes; see :func:`parse_goodput`.

    Returns:
        Counts, rates a second, and for each metric M ``mean_M_ms``, ``median_M_ms``, ``std_M_ms``
        and ``pP_M_ms``.
    """
    done = [each for each in outcomes if not each.error]
    tokens_in = sum(each.prompt_len for each in done)
    tokens_out = sum(each.output_tokens for each in done)
    good = sum(_is_good(each, goodput) for each in done) if goodput else 0
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if goodput else None,
        "output_throughput": tokens_out / duration,
        "total_token_throughput": (tokens_in + tokens_out) / duration,
        "max_output_tokens_per_s": peak_chunk_rate(done),
        "max_concurrent_requests": peak_concurrency(done),
    }
    for metric in METRICS:
        values = np.array(values_of(metric.name, done) or [0.0]) * 1000
        result[f"mean_{metric.name}_ms"] = float(values.mean())
        result[f"median_{metric.name}_ms"] = float(np.median(values))
        result[f"std_{metric.name}_ms"] = float(values.std())
        for p in percentiles:
            result[f"p{p:g}_{metric.name}_ms"] = float(np.percentile(values, p))
    return result


def values_of(name: str, done: Sequence[Outcome]) -> list[float]:
    """Seconds of a metric: one a request, of ITL one a gap; no TPOT of answers of one token."""
    match name:
        case "ttft":
            return [each.ttft for each in done]
        case "tpot":
            return [_tpot(each) for each in done if each.output_tokens > 1]
        case "itl":
            return [gap for each in done for gap in each.itl]
        case "e2el":
            return [each.latency for each in done]
    return [each.queue_time for each in done]


def peak_chunk_rate(done: Sequence[Outcome]) -> float:
    """Most chunks that came in one second, seconds counted from the first request."""
    if not done:
        return 0.0
    first = min(each.start_time for each in done)
    counts: dict[int, int] = {}
    for each in done:
        at = each.start_time + each.ttft - first
        for gap in (0.0, *each.itl):
            at += gap
            counts[int(at)] = counts.get(int(at), 0) + 1
    return float(max(counts.values()))


def peak_concurrency(done: Sequence[Outcome]) -> int:
    """Most requests under way at one time; one that ends as another starts does not count."""
    changes = [(each.start_time, 1) for each in done]
    changes += [(each.start_time + each.latency, -1) for each in done]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _tpot(each: Outcome) -> float:
    """Seconds for each token after the first; 0 for an answer of one."""
    more = each.output_tokens - 1
    return (each.latency - each.ttft) / more if more > 0 else 0.0


def _is_good(each: Outcome, limits: Mapping[str, float]) -> bool:
    times = {"ttft": each.ttft, "tpot": _tpot(each), "e2el": each.latency}
    return all(times[name] * 1000 <= limit for name, limit in limits.items())
