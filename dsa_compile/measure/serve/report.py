"""A serving benchmark's figures as text, JSON and a plot, in the layout of ``vllm bench serve``."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsa_compile.errors import UserError
from dsa_compile.measure.serve.client import Outcome
from dsa_compile.measure.serve.metrics import METRICS, values_of

_WIDTH = 50
_LINES = (
    ("Successful requests:", "completed", ""),
    ("Failed requests:", "failed", ""),
    ("Maximum request concurrency:", "max_concurrency", ""),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", ""),
    ("Total generated tokens:", "total_output_tokens", ""),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ""),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)


def to_text(result: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The printed report.

    Args:
        result: as :func:`summarize` gives it, with ``max_concurrency`` and ``request_rate``.
        metrics: names of the metrics to show.
        percentiles: to show of each.
    """
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for label, key, form in _LINES:
        value = result.get(key)
        if value is not None and value != "inf":
            lines.append(f"{label:<40} {value:<10{form}}")
    for metric in METRICS:
        if metric.name not in metrics:
            continue
        lines.append(f"{metric.title:-^{_WIDTH}}")
        shown = [
            ("Mean", "mean"),
            ("Median", "median"),
            *((f"P{p:g}", f"p{p:g}") for p in percentiles),
        ]
        for word, key in shown:
            label = f"{word} {metric.label} (ms):"
            lines.append(f"{label:<40} {result[f'{key}_{metric.name}_ms']:<10.2f}")
    return "\n".join((*lines, "=" * _WIDTH))


def detailed(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Outcomes of all requests, failed ones too, field by field, for ``--save-detailed``."""
    return {
        "input_lens": [each.prompt_len for each in outcomes],
        "output_lens": [each.output_tokens for each in outcomes],
        "start_times": [each.start_time for each in outcomes],
        "queue_times": [each.queue_time for each in outcomes],
        "ttfts": [each.ttft for each in outcomes],
        "itls": [each.itl for each in outcomes],
        "latencies": [each.latency for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result as JSON.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def plot(path: Path, outcomes: Sequence[Outcome], metrics: Sequence[str]) -> None:
    """Draw the distribution of each metric: the share of values below a time.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    done = [each for each in outcomes if not each.error]
    drawn = [metric for metric in METRICS if metric.name in metrics]
    columns = min(2, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    for place, metric in enumerate(drawn, 1):
        axes = figure.add_subplot(rows, columns, place)
        values = sorted(1000 * value for value in values_of(metric.name, done))
        shares = [100 * (n + 1) / len(values) for n in range(len(values))]
        axes.step(values, shares, where="post")
        axes.set(title=metric.title, xlabel="ms", ylabel="% of values", ylim=(0, 101))
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write --plot {path}: {error}") from None
