"""Figures of a serving benchmark from outcomes whose times are known, worked out by hand."""

import math
import random

import pytest

pytest.importorskip("aiohttp")

from dsa_compile.errors import UserError
from dsa_compile.measure.serve.client import Outcome
from dsa_compile.measure.serve.metrics import parse_goodput, peak_concurrency, summarize
from dsa_compile.measure.serve.report import detailed, plot, save, to_text
from dsa_compile.measure.serve.run import arrival_times

# Powers of two: sums of them are exact.
OUTCOMES = [
    Outcome(10, 5, 0.0, 0.0, 0.25, [0.5, 0.5, 0.5, 0.25], 2.0, "abcde"),
    Outcome(20, 2, 1.0, 0.5, 0.5, [0.25], 0.75, "fg"),
    Outcome(30, 1, 2.0, 0.0, 1.0, [], 1.0, "h"),
    Outcome(40, 0, 0.0, 0.0, error="500 Internal Server Error: {}"),
]


def test_figures_are_exact() -> None:
    found = summarize(OUTCOMES, 4.0, (50.0, 75.0, 100.0), {"ttft": 500.0, "tpot": 437.5})
    expected = {
        "duration": 4.0,
        "completed": 3,
        "failed": 1,
        "total_input_tokens": 60,
        "total_output_tokens": 8,
        "request_throughput": 0.75,
        "request_goodput": 0.5,  # the third takes too long to its first token
        "output_throughput": 2.0,
        "total_token_throughput": 17.0,
        "max_output_tokens_per_s": 4.0,  # at 1.25, 1.75 and 1.5, 1.75
        "max_concurrent_requests": 2,
        "mean_ttft_ms": pytest.approx(1750 / 3),
        "median_ttft_ms": 500.0,
        "p75_ttft_ms": 750.0,
        "mean_tpot_ms": (437.5 + 250) / 2,  # none of an answer of one token
        "median_tpot_ms": (437.5 + 250) / 2,
        "std_tpot_ms": (437.5 - 250) / 2,
        "mean_itl_ms": 400.0,
        "median_itl_ms": 500.0,
        "p50_itl_ms": 500.0,
        "mean_e2el_ms": 1250.0,
        "median_e2el_ms": 1000.0,
        "p100_e2el_ms": 2000.0,
        "p100_client_queue_time_ms": 500.0,
    }
    assert {key: found[key] for key in expected} == expected
    assert summarize(OUTCOMES, 4.0, (99.0,))["request_goodput"] is None


def test_a_run_in_which_all_fails() -> None:
    found = summarize(OUTCOMES[3:], 1.0, (99.0,))
    assert (found["completed"], found["failed"], found["p99_ttft_ms"]) == (0, 1, 0.0)


def test_requests_that_follow_each_other_are_not_concurrent() -> None:
    outcomes = [Outcome(start_time=float(n), latency=1.0) for n in range(3)]
    assert peak_concurrency(outcomes) == 1


def test_the_printed_report(tmp_path) -> None:
    result = summarize(OUTCOMES, 4.0, (99.0, 99.9))
    result |= {"max_concurrency": 3, "request_rate": "inf"}
    text = to_text(result, ["ttft", "e2el"], (99.0, 99.9))
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    for line in (
        "Successful requests:                     3",
        "Failed requests:                         1",
        "Maximum request concurrency:             3",
        "Benchmark duration (s):                  4.00",
        "Total generated tokens:                  8",
        "Output token throughput (tok/s):         2.00",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          583.33",
        "P99.9 TTFT (ms):                         999.00",
        "----------------End-to-end Latency----------------",
    ):
        assert line in lines
    assert "RPS" not in text
    assert "TPOT" not in text


def test_saved_and_drawn(tmp_path) -> None:
    file = tmp_path / "deep" / "result.json"
    save(file, detailed(OUTCOMES))
    assert '"errors"' in file.read_text()
    pytest.importorskip("matplotlib")
    plot(tmp_path / "times.png", OUTCOMES, ["ttft", "tpot", "itl"])
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot write"):
        save(file / "below", {})


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_arrivals_keep_the_rate(burstiness: float) -> None:
    times = arrival_times(200, 8.0, burstiness, random.Random(3))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(25.0)
    assert times == arrival_times(200, 8.0, burstiness, random.Random(3))
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    assert spread == pytest.approx(burstiness**-0.5, rel=0.3)
    assert arrival_times(3, math.inf, 1.0, random.Random(0)) == [0.0] * 3


def test_goodput_limits() -> None:
    assert parse_goodput(["ttft:200", "e2el:1e3"]) == {"ttft": 200.0, "e2el": 1000.0}
    for pair, words in (("itl:3", "itl"), ("ttft", "NAME:MILLISECONDS"), ("ttft:-1", "NAME")):
        with pytest.raises(UserError, match=words):
            parse_goodput([pair])
