"""Counters of engine processes, summed over those that served in turn."""

import logging

import msgspec
import pytest

from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.stats import SchedulerStats, StepKind
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.protocol import FromEngine, Ready, Stats, Step
from tests.server.serving import Server


def engine(running: int = 1, waiting: int = 2, **others) -> SchedulerStats:
    return SchedulerStats(
        running, waiting, free_blocks=5, cached_blocks=1, owned_blocks=2,
        **{"preemptions": 0, "prefix_hit_tokens": 0, **others},
    )  # fmt: skip


def stats(steps, seconds: float, preemptions: int = 0, busiest=None, **others) -> Stats:
    counts = {StepKind(graph, variant): count for graph, variant, count in steps}
    waited = seconds * 3 / 4
    own = engine(preemptions=preemptions, step_counts=counts, wait_seconds=waited, **others)
    return Stats(own, seconds, busiest or {})


def value(metrics: Metrics, start: str) -> float:
    lines = metrics.text().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))


def test_a_new_process_counts_on() -> None:
    metrics = Metrics("m")
    metrics.engine_stats(stats([("eager", "short", 2)], 1.0, 3))
    metrics.engine_stats(stats([("eager", "short", 2), ("64", "long", 5)], 2.0, 3))
    metrics.engine_started()
    metrics.engine_stats(stats([("eager", "short", 1)], 0.5))
    metrics.engine_stats(stats([("eager", "short", 1), ("8", "long", 1)], 0.75, 1))
    step = "dsa:engine_steps_total"
    assert value(metrics, step) == 9
    labels = 'graph="{}",model_name="m",variant="{}"'
    for graph, variant, count in (("eager", "short", 3), ("64", "long", 5), ("8", "long", 1)):
        assert value(metrics, f"{step}{{{labels.format(graph, variant)}}}") == count
    assert value(metrics, "dsa:engine_step_seconds_total") == 2.75
    assert value(metrics, "dsa:engine_host_seconds_total") == 0.6875
    assert value(metrics, "dsa:num_preemptions_total") == 4
    assert value(metrics, "dsa:kv_cache_usage_perc") == 0.25


def test_a_new_process_counts_on_though_it_has_counted_more() -> None:
    """First statistics of a process may come when it has made more steps than the one before it."""
    metrics = Metrics("m")
    metrics.engine_started()
    metrics.engine_stats(stats([("eager", "short", 2)], 1.0, 1, drafted=(4,), accepted=(1,)))
    metrics.engine_started()
    assert value(metrics, "dsa:num_requests_running{") == 0
    assert value(metrics, "dsa:num_requests_waiting{") == 0
    assert value(metrics, "dsa:kv_cache_usage_perc") == 0
    metrics.engine_stats(stats([("eager", "short", 3)], 1.5, 1, drafted=(9,), accepted=(2,)))
    assert value(metrics, "dsa:engine_steps_total") == 5
    assert value(metrics, "dsa:engine_step_seconds_total") == 2.5
    assert value(metrics, "dsa:num_preemptions_total") == 2
    assert value(metrics, "dsa:spec_decode_num_drafts_total") == 13
    assert value(metrics, "dsa:spec_decode_num_accepted_tokens_total") == 3


def test_throughput_is_logged_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1000.0, 5000.0, 5005.0, 5010.0, 5011.0, 5025.0, 9000.0])
    metrics = Metrics("m", clock=lambda: next(times))
    caplog.set_level(logging.INFO, "dsa_compile.server.metrics")
    working, idle = stats([], 0.0), Stats(engine(running=0, waiting=0), 0.0, {})
    for found, made in (
        (idle, 0), (working, 0), (working, 30), (working, 20), (working, 0), (idle, 150),
        (working, 0),
    ):  # fmt: skip
        metrics.generation_tokens.inc(made)
        metrics.engine_stats(found)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "0.0 prompt tokens/s, 5.0 generated; 1 running, 2 waiting, 25.0 % of the cache in use",
        "0.0 prompt tokens/s, 10.0 generated; 0 running, 0 waiting, 25.0 % of the cache in use",
    ]


def test_probes_are_not_in_the_log(server: Server) -> None:
    for path in ("/ready", "/health", "/metrics", "/version"):
        assert server.get(path).status == 200
    server.wait_for_log("GET /version")
    assert not any(f"GET /{name}" in line for line in server.log for name in ("ready", "metrics"))
    server.wait_for_log(r"the engine is ready: caches of \d+ tokens for up to \d+ requests")


def test_lanes_and_experts_have_gauges_of_their_own() -> None:
    metrics = Metrics("m")
    metrics.engine_stats(stats([], 1.0, lanes=(engine(3, 0), engine(1, 2)), busiest={4: 1.5}))
    for lane, running, waiting in ((0, 3, 0), (1, 1, 2)):
        labels = f'{{lane="{lane}",model_name="m"}}'
        assert value(metrics, f"dsa:num_requests_running_by_lane{labels}") == running
        assert value(metrics, f"dsa:num_requests_waiting_by_lane{labels}") == waiting
    assert value(metrics, 'dsa:busiest_expert_ratio{layer="4",model_name="m"}') == 1.5
    metrics.engine_started()
    assert b"by_lane{" not in metrics.text(), "of an engine that is gone"


def test_drafts_have_the_names_of_others_dashboards() -> None:
    metrics = Metrics("m")
    metrics.engine_stats(stats([], 1.0, drafted=(10, 8), accepted=(7, 3)))
    metrics.engine_started()
    metrics.engine_stats(stats([], 0.1, drafted=(2, 2), accepted=(1, 0)))  # another process
    name = "dsa:spec_decode_num"
    assert value(metrics, f"{name}_drafts_total") == 12
    assert value(metrics, f"{name}_draft_tokens_total") == 22
    assert value(metrics, f"{name}_accepted_tokens_total") == 11
    for position, count in ((0, 8), (1, 3)):
        labels = f'{{model_name="m",position="{position}"}}'
        assert value(metrics, f"{name}_accepted_tokens_per_pos_total{labels}") == count


def test_forced_acceptance_is_named_beside_the_counts() -> None:
    for forced in (False, True):
        metrics = Metrics("m")
        metrics.engine_stats(
            stats([], 1.0, drafted=(10,), accepted=(7,), force_accept=[None, 1.0][forced])
        )
        assert metrics.text().decode().count("(acceptance forced)") == 2 * forced


def test_acceptance_below_the_recorded_one_is_a_gauge() -> None:
    metrics = Metrics("m")
    for low in (True, False):
        metrics.engine_stats(
            stats([], 1.0, drafted=(10,), accepted=(7,), acceptance_problem="few" * low)
        )
        assert value(metrics, "dsa:spec_decode_low_acceptance{") == low


def test_steps_of_a_server(server: Server) -> None:
    """On a CPU every step runs without a graph; short contexts take the short variant if any."""
    before = server.metric("dsa:engine_steps_total")
    server.post("/v1/completions", prompt="import", max_tokens=9, ignore_eos=True)
    server.wait_for_idle()
    assert server.metric("dsa:engine_steps_total") - before == 9
    assert server.metric(r'dsa:engine_steps_total\{graph="eager",.*\}') >= 9
    seconds = server.metric("dsa:engine_step_seconds_total")
    assert 0 < server.metric("dsa:engine_host_seconds_total") <= seconds


def test_limits_and_counts_of_every_kind_reach_the_http_process() -> None:
    limits = SchedulerConfig(9, 4, 16, 8, 64, num_drafts=2, draft_max_rows=None)
    ready = Ready(limits, 100, (1, 2))
    counts = Step([], stats([("eager", "long", 3)], 1.0, lanes=(engine(), engine())))
    for message in (ready, counts):
        data = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.decode(data, type=FromEngine) == message
