"""Times and counts of one engine request, for metrics and traces."""

import time

from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.tracing import RequestSpan, Tracing


class RequestRecord:
    """Notes the tokens of one request as they come, and its end once.

    Times are seconds of :func:`time.perf_counter`, a clock that the engine process shares.

    Args:
        metrics: count the request.
        tracing: makes a span of it; None for no traces.
        request_id: of the engine's request.
        prompt_tokens: of its prompt.
        params: of the request.

    Attributes:
        num_tokens: generated so far.
        cached_tokens: of the prompt, whose cache rows were reused.
    """

    def __init__(
        self,
        metrics: Metrics,
        tracing: Tracing | None,
        request_id: str,
        prompt_tokens: int,
        params: SamplingParams,
    ) -> None:
        self.num_tokens = 0
        self.cached_tokens = 0
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._arrived = time.perf_counter()
        self._scheduled: float | None = None
        self._first = self._last = self._arrived
        self._span: RequestSpan | None = None
        if tracing is not None:
            self._span = tracing.start(request_id, params)

    def tokens(self, count: int, cached_tokens: int, scheduled_at: float | None) -> None:
        """Note tokens that came.

        Args:
            count: of tokens; nothing is noted of none.
            cached_tokens: of the prompt.
            scheduled_at: when the request got cache blocks.
        """
        if not count:
            return
        now = time.perf_counter()
        metrics = self._metrics
        if not self.num_tokens:
            self.cached_tokens = cached_tokens
            self._first, self._scheduled = now, scheduled_at
            metrics.time_to_first_token.observe(now - self._arrived)
            metrics.prefix_queries.inc(self._prompt_tokens)
            metrics.prefix_hits.inc(cached_tokens)
        else:
            metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now
        self.num_tokens += count
        metrics.generation_tokens.inc(count)

    def end(self, reason: str) -> None:
        """Note the end of the request.

        Args:
            reason: a finish reason, "abort" and "error" among them.
        """
        now = time.perf_counter()
        metrics = self._metrics
        metrics.finished(reason)
        metrics.prompt_tokens.inc(self._prompt_tokens)
        metrics.prompt_length.observe(self._prompt_tokens)
        metrics.generation_length.observe(self.num_tokens)
        if reason != "abort":
            metrics.e2e_latency.observe(now - self._arrived)
        times = self._times(now)
        if "time_in_queue" in times:
            metrics.queue_time.observe(times["time_in_queue"])
            metrics.prefill_time.observe(times["time_in_model_prefill"])
            metrics.decode_time.observe(times["time_in_model_decode"])
        if self.num_tokens > 1:
            each = (self._last - self._first) / (self.num_tokens - 1)
            metrics.time_per_output_token.observe(each)
        if self._span is not None:
            counts = {
                "prompt_tokens": self._prompt_tokens,
                "completion_tokens": self.num_tokens,
                "cached_tokens": self.cached_tokens,
            }
            self._span.end(reason, times, counts)

    def _times(self, now: float) -> dict[str, float]:
        """Seconds, as far as the request came."""
        found = {"e2e": now - self._arrived}
        if self.num_tokens:
            found["time_to_first_token"] = self._first - self._arrived
            scheduled = self._scheduled
            if scheduled is not None:
                found["time_in_queue"] = max(0.0, scheduled - self._arrived)
                found["time_in_model_prefill"] = self._first - scheduled
                found["time_in_model_decode"] = self._last - self._first
                found["time_in_model_inference"] = self._last - scheduled
        return found
