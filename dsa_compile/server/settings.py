"""Settings of a server; flags and configuration files fill them in."""

from dataclasses import dataclass, field
from pathlib import Path

from dsa_compile.errors import UserError


@dataclass(frozen=True)
class Settings:
    """Settings of a server of one artifact.

    Args:
        artifact: the directory.
        digest: serve the artifact with this digest and no other, and run the machine code in it
            unless ``engine`` says not to.
        host: address to listen on.
        port: likewise; 0 takes a free one, which is logged.
        served_model_name: names that requests may use, the first of which answers carry.
        api_key: keys of which a request must carry one; none lets everyone in.
        max_queued_requests: requests that may wait beyond those an engine step holds; more get 429.
        max_request_bytes: longest body of a request.
        request_read_timeout: seconds that a body may take to arrive.
        request_timeout: seconds after which a request that has no ``timeout`` of its own ends with
            an error; None for never.
        max_choices: most ``n`` times prompts of one request.
        max_logprobs: most alternatives reported with each token.
        allowed_origins: origins of web pages that may use the server (CORS).
        timeout_graceful_shutdown: seconds that running requests have after SIGTERM; None for all
            the time they need.
        otlp_traces_endpoint: URL of an OpenTelemetry collector; None for no traces.
        log_format: see :mod:`dsa_compile.server.logs`.
        log_level: likewise.
        engine: arguments of ``Engine.load``.

    Raises:
        UserError: a value is out of its range.
    """

    artifact: Path
    digest: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = field(default=(), repr=False)
    max_queued_requests: int = 1024
    max_request_bytes: int = 8 << 20
    request_read_timeout: float = 60.0
    request_timeout: float | None = None
    max_choices: int = 128
    max_logprobs: int = 20
    allowed_origins: tuple[str, ...] = ()
    timeout_graceful_shutdown: float | None = None
    otlp_traces_endpoint: str | None = None
    log_format: str = "text"
    log_level: str = "info"
    engine: dict[str, str | int | float | bool | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"--port must be in [0, 65535]; got {self.port}")
        for name, low in (
            ("max_queued_requests", 0),
            ("max_request_bytes", 1),
            ("max_choices", 1),
            ("max_logprobs", 0),
        ):
            if getattr(self, name) < low:
                flag = name.replace("_", "-")
                raise UserError(f"--{flag} must be at least {low}; got {getattr(self, name)}")
        for name in ("request_read_timeout", "request_timeout", "timeout_graceful_shutdown"):
            seconds = getattr(self, name)
            low_is_in = name == "timeout_graceful_shutdown"  # 0 aborts at once
            if seconds is None or 0 < seconds <= 1e6 or (low_is_in and seconds == 0):
                continue
            bounds = "[0, 1e6]" if low_is_in else "(0, 1e6]"
            raise UserError(f"--{name.replace('_', '-')} must be in {bounds}; got {seconds}")
        if any(not key for key in self.api_key):
            raise UserError("--api-key must not be empty")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in requests and answers."""
        return self.served_model_name or (self.artifact.resolve().name,)
