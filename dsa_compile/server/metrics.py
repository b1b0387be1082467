"""Prometheus metrics, named after vLLM's with the prefix ``dsa:``."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from dsa_compile.runtime.scheduling.stats import StepKind
from dsa_compile.server.protocol import Stats

Key = TypeVar("Key")

_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(30.0, 60.0, 300.0),
)
_TOKENS = (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_LOG = logging.getLogger(__name__)
_LOG_EVERY = 10.0  # seconds


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        model: name of the model, a label of every metric.
        clock: seconds.
    """

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counted: tuple[float, ...] = ()
        self._since, self._busy = clock(), False
        registry = self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            labels = ["model_name"]
            made = Histogram(f"dsa:{name}", text, labels, registry=registry, buckets=buckets)
            return made.labels(model)

        def counter(name: str, text: str) -> prometheus_client.Counter:
            labels = ["model_name"]
            made = prometheus_client.Counter(f"dsa:{name}", text, labels, registry=registry)
            return made.labels(model)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"dsa:{name}", text, ["model_name"], registry=registry).labels(model)

        def labelled(name: str, text: str, label: str) -> Gauge:
            return Gauge(f"dsa:{name}", text, ["model_name", label], registry=registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival of a request to its first token", _SECONDS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Time between the tokens of a request", _SECONDS
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "Arrival of a request to its last token", _SECONDS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Time of a request a token after its first",
            _SECONDS,
        )  # fmt: skip
        self.queue_time = histogram(
            "request_queue_time_seconds", "Arrival of a request until it got cache blocks", _SECONDS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "From then to its first token", _SECONDS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From its first token to its last", _SECONDS
        )
        self.prompt_length = histogram(
            "request_prompt_tokens", "Tokens of a request's prompt", _TOKENS
        )
        self.generation_length = histogram(
            "request_generation_tokens", "Tokens generated for a request", _TOKENS
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens taken")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up for reuse")
        self.prefix_hits = counter("prefix_cache_hits", "Prompt tokens reused")
        self.running = gauge("num_requests_running", "Requests that hold cache blocks")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for cache blocks")
        self._lanes_running, self._lanes_waiting = (
            labelled(f"num_requests_{state}_by_lane", f"Requests of each lane that {verb}", "lane")
            for state, verb in (("running", "hold cache blocks"), ("waiting", "wait for some"))
        )
        self._busiest_expert = labelled(
            "busiest_expert_ratio",
            "Tokens of a layer's busiest routed expert over those of an average one",
            "layer",
        )
        self.cache_usage = gauge("kv_cache_usage_perc", "Share of cache blocks in use, 0 to 1")
        self._low_acceptance = gauge(
            "spec_decode_low_acceptance",
            "1 while fewer drafts are right than when the artifact was evaluated",
        )
        self._engine_up = gauge("engine_up", "1 while the engine takes requests")
        self._successes = prometheus_client.Counter(
            "dsa:request_success", "Requests that ended", ["model_name", "finished_reason"],
            registry=registry,
        )  # fmt: skip
        self._responses = prometheus_client.Counter(
            "dsa:http_responses", "HTTP responses", ["method", "path", "status"], registry=registry
        )
        self._engine = _EngineCounters(model)
        registry.register(self._engine)
        self._model = model

    def finished(self, reason: str) -> None:
        """Count a request that ended."""
        self._successes.labels(self._model, reason).inc()

    def responded(self, method: str, path: str, status: int) -> None:
        """Count an HTTP response; ``path`` is a route's, never what a client made up."""
        self._responses.labels(method, path, str(status)).inc()

    def engine_started(self) -> None:
        """Another engine process runs: nothing of the one before does, and counts begin anew."""
        for gauge in (self.running, self.waiting, self.cache_usage):
            gauge.set(0)
        for labelled in (self._lanes_running, self._lanes_waiting, self._busiest_expert):
            labelled.clear()
        self._engine.start()

    def engine_stats(self, stats: Stats) -> None:
        """Take statistics of the engine process."""
        engine = stats.engine
        self.running.set(engine.running)
        self.waiting.set(engine.waiting)
        blocks = engine.free_blocks + engine.cached_blocks + engine.owned_blocks
        self.cache_usage.set(engine.owned_blocks / blocks if blocks else 0.0)
        self._low_acceptance.set(bool(engine.acceptance_problem))
        for lane, own in enumerate(engine.lanes):
            self._lanes_running.labels(self._model, lane).set(own.running)
            self._lanes_waiting.labels(self._model, lane).set(own.waiting)
        for layer, ratio in stats.busiest_experts.items():
            self._busiest_expert.labels(self._model, layer).set(ratio)
        self._engine.take(stats)
        self._log(engine.running, engine.waiting)

    def _log(self, running: int, waiting: int) -> None:
        """Say every few seconds, while there is work, how much of it gets done."""
        names = ("dsa:prompt_tokens_total", "dsa:generation_tokens_total")
        labels, now = {"model_name": self._model}, self._clock()
        seconds = now - self._since
        if not self._busy or seconds >= _LOG_EVERY:
            counted = tuple(self._registry.get_sample_value(n, labels) or 0.0 for n in names)
            if self._busy:
                prompt, made = (
                    (new - old) / seconds for new, old in zip(counted, self._counted, strict=True)
                )
                _LOG.info(
                    "%.1f prompt tokens/s, %.1f generated; %d running, %d waiting, %.1f %% of the "
                    "cache in use",
                    *(prompt, made, running, waiting),
                    100 * (self._registry.get_sample_value("dsa:kv_cache_usage_perc", labels) or 0),
                )
            self._since, self._counted = now, counted
        self._busy = running + waiting > 0

    def engine_state(self, up: bool, restarts: int) -> None:
        """Take the state of the engine process, and how many of its kind were replaced."""
        self._engine_up.set(up)
        self._engine.restarts = restarts

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)


_COUNTERS = {
    "preemptions": ("num_preemptions", "Requests that were sent back to the queue"),
    "failed_steps": ("engine_failed_steps", "Steps that failed and were run in parts"),
    "late_kernels": ("engine_late_kernels", "Kernels compiled or loaded after loading"),
    "step_seconds": ("engine_step_seconds", "Time that the steps of the engine took"),
    "host_seconds": ("engine_host_seconds", "Of it, time in which the host did not wait"),
}
_STEPS = "Steps of the engine by rows of the CUDA graph, or eager, and variant"
_DRAFTED = "Draft tokens that steps checked"
_CHAINS = "Drafts that steps checked, each of one or more tokens"
_ACCEPTED = "Draft tokens that were right"
_BY_DEPTH = "Draft tokens that were right, by position in their draft"


class _Keyed(Generic[Key]):
    """Counts by key of an engine process and of those before it."""

    def __init__(self) -> None:
        self._last: Counter[Key] = Counter()
        self._before: Counter[Key] = Counter()

    def start(self) -> None:
        """Begin with another process."""
        self._before += self._last
        self._last = Counter()

    def take(self, counts: Mapping[Key, int]) -> None:
        """Take the process's present counts."""
        self._last = Counter(counts)

    def total(self) -> Counter[Key]:
        """The counts of all processes."""
        return self._before + self._last


class _EngineCounters(Collector):
    """Counters that an engine process keeps, summed over the processes that served in turn."""

    def __init__(self, model: str) -> None:
        self.restarts = 0
        self._model = model
        self._last = dict.fromkeys(_COUNTERS, 0.0)
        self._before = dict.fromkeys(_COUNTERS, 0.0)  # of processes that ended
        self._steps = _Keyed[StepKind]()
        self._drafted, self._accepted = _Keyed[int](), _Keyed[int]()
        self._forced = False

    def start(self) -> None:
        for field, count in self._last.items():
            self._before[field] += count
        self._last = dict.fromkeys(_COUNTERS, 0.0)
        for keyed in (self._steps, self._drafted, self._accepted):
            keyed.start()

    def take(self, stats: Stats) -> None:
        engine = stats.engine
        self._last = {
            "preemptions": engine.preemptions,
            "failed_steps": engine.memory_failures + engine.op_failures,
            "late_kernels": engine.late_kernels,
            "step_seconds": stats.step_seconds,
            "host_seconds": stats.step_seconds - engine.wait_seconds,
        }
        self._steps.take(engine.step_counts)
        self._drafted.take(dict(enumerate(engine.drafted)))
        self._accepted.take(dict(enumerate(engine.accepted)))
        self._forced = engine.force_accept is not None

    def collect(self) -> list[Metric]:
        text = "Engine processes that ended and were replaced"
        found = [self._family("engine_restarts", text, self.restarts)]
        for field, (name, text) in _COUNTERS.items():
            found.append(self._family(name, text, self._before[field] + self._last[field]))
        labels = ["model_name", "graph", "variant"]
        steps = CounterMetricFamily("dsa:engine_steps", _STEPS, labels=labels)
        for kind, count in self._steps.total().items():
            steps.add_metric([self._model, *kind], count)
        return [*found, steps, *self._drafts()]

    def _drafts(self) -> list[Metric]:
        drafted, accepted = self._drafted.total(), self._accepted.total()
        name = "spec_decode_num_accepted_tokens"
        forced = " (acceptance forced)" if self._forced else ""
        by_depth = CounterMetricFamily(
            f"dsa:{name}_per_pos", _BY_DEPTH + forced, labels=["model_name", "position"]
        )
        for depth, count in sorted(accepted.items()):
            by_depth.add_metric([self._model, str(depth)], count)
        return [
            self._family("spec_decode_num_drafts", _CHAINS, drafted[0]),
            self._family("spec_decode_num_draft_tokens", _DRAFTED, drafted.total()),
            self._family(name, _ACCEPTED + forced, accepted.total()),
            by_depth,
        ]

    def _family(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"dsa:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family
