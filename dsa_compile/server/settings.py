"""Settings of a server; flags and configuration files fill them in."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsa_compile.common.option_keywords import has_options
from dsa_compile.common.options import check, option
from dsa_compile.errors import OptionValueError
from dsa_compile.server.logs import FORMATS, LEVELS


@has_options
@dataclass(frozen=True)
class Settings:
    """Settings of a server of one artifact.

    Args:
        artifact: the directory.
        engine: options of ``Engine.load``. With ``digest`` the server serves the artifact that has
            it and no other, and runs the machine code in it unless ``shipped_kernels`` says not to.

    Raises:
        UserError: a value is out of its range.
    """

    artifact: Path
    host: str = option("127.0.0.1", "address to listen on", metavar="HOST")
    port: int = option(
        8000, "port to listen on; 0 takes a free one, which is logged", least=0, most=(1 << 16) - 1
    )
    served_model_name: tuple[str, ...] = option(
        (), "names for requests to use, the first of which answers carry", several="words",
        metavar="NAME", unset="the model's name or directory",
    )  # fmt: skip
    api_key: tuple[str, ...] = option(
        (), "let in requests with one of these keys only", several="words", metavar="KEY",
        unset="$DSA_API_KEY, or everyone", repr=False,
    )  # fmt: skip
    allowed_origins: tuple[str, ...] = option(
        (), "web pages that may use the server, CORS", several="words", metavar="ORIGIN",
        unset="none",
    )  # fmt: skip
    max_queued_requests: int = option(
        1024, "requests that wait beyond those of a step; more get 429", unit="requests", least=0
    )
    max_queued_tokens: int = option(
        8 << 20, "prompt tokens that wait beyond those that the caches hold; more get 429",
        unit="tokens", least=0,
    )  # fmt: skip
    max_request_bytes: int = option(8 << 20, "longest body of a request", unit="bytes", least=1)
    request_read_timeout: float = option(
        60.0, "time for a body to arrive", unit="seconds", least=0, most=10**6, above=True
    )
    request_timeout: float | None = option(
        None, "time for a request to end that has no timeout of its own", unit="seconds",
        unset="none", least=0, most=10**6, above=True,
    )  # fmt: skip
    max_choices: int = option(128, "most answers to one request: its n times its prompts", least=1)
    max_logprobs: int = option(20, "most alternatives reported with each token", least=0)
    timeout_graceful_shutdown: float | None = option(
        None, "time that requests have after SIGTERM", unit="seconds", unset="all they need",
        least=0, most=10**6,
    )  # fmt: skip
    otlp_traces_endpoint: str | None = option(
        None, "OpenTelemetry collector for a span of each request, OTLP over HTTP", unset="none",
        metavar="URL",
    )  # fmt: skip
    log_format: str = option("text", "form of log lines", choices=FORMATS)
    log_level: str = option("info", "least to log", choices=LEVELS, also=("uvicorn_log_level",))
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self)
        if any(not key for key in self.api_key):
            raise OptionValueError("{api_key} must not be empty")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in requests and answers."""
        return self.served_model_name or (self.artifact.resolve().name,)
