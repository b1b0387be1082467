"""One streamed request to a server of OpenAI's API, and the times at which its answer came."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from dsa_compile.errors import UserError
from dsa_compile.measure.serve.workload import Sample

Backend = Literal["openai", "openai-chat"]
PATHS: dict[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_LONGEST_LINE = 1 << 20  # bytes of a server-sent event


@dataclass(slots=True)
class Outcome:
    """Outcome of one request; times are seconds.

    Attributes:
        prompt_len: tokens, as the server counts them, or those that were sent.
        output_tokens: as the server counts them, else the number of chunks.
        start_time: at which it was sent, of :func:`time.perf_counter`.
        queue_time: that it waited here, for the limit on concurrency.
        ttft: from sending it to the first chunk that has a token.
        itl: between one such chunk and the next.
        latency: from sending it to the last of them.
        text: of the answer.
        error: one line; empty if the answer is complete.
    """

    prompt_len: int = 0
    output_tokens: int = 0
    start_time: float = 0.0
    queue_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    text: str = ""
    error: str = ""


@dataclass(frozen=True)
class Target:
    """Target of requests, and what they have in common.

    Args:
        base_url: of the server, without the path.
        backend: the endpoint.
        model: name of the model.
        headers: of every request.
        extra: further fields of every body, such as ``temperature``.
    """

    base_url: str
    backend: Backend
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Address of the endpoint."""
        return self.base_url + PATHS[self.backend]

    def body(self, sample: Sample) -> dict[str, Any]:
        """The body of a request."""
        own: dict[str, Any]
        if self.backend == "openai":
            own = {"prompt": sample.prompt, "max_tokens": sample.output_len}
        else:
            messages = [{"role": "user", "content": sample.prompt}]
            own = {"messages": messages, "max_completion_tokens": sample.output_len}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **own, **options, **self.extra}


def new_session() -> aiohttp.ClientSession:
    """A session without limits of its own: neither connections nor times."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        read_bufsize=_LONGEST_LINE,
        trust_env=True,
    )


async def first_model(
    session: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]
) -> str:
    """The first model that the server lists.

    Raises:
        UserError: there is no such server, or it lists none.
    """
    url = base_url + "/v1/models"
    try:
        async with session.get(url, headers=headers) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        reason = _one_line(error)
        raise UserError(f"{url} lists no model ({reason}); give --model") from None


async def send(session: aiohttp.ClientSession, target: Target, sample: Sample) -> Outcome:
    """Send one request and read its answer; an error is in the outcome."""
    sent = sample.prompt
    found = Outcome(prompt_len=len(sent) if isinstance(sent, list) else 0)
    body = json.dumps(target.body(sample)).encode()
    headers = {"content-type": "application/json", **target.headers}
    found.start_time = time.perf_counter()
    try:
        async with session.post(target.url, data=body, headers=headers) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                found.error = _one_line(f"{response.status} {response.reason}: {text}")
                return found
            await _read(response, found, target.backend)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        found.error = _one_line(error)
    return found


async def _read(response: aiohttp.ClientResponse, found: Outcome, backend: Backend) -> None:
    last, chunks, ended = found.start_time, 0, False
    texts: list[str] = []
    counted: int | None = None
    async for line in response.content:
        now = time.perf_counter()
        data = line.strip()
        if not data.startswith(b"data:"):
            continue
        data = data[5:].strip()
        if data == b"[DONE]":
            ended = True
            break
        event = json.loads(data)
        if error := event.get("error"):
            raise ValueError(error.get("message", error) if isinstance(error, dict) else error)
        if usage := event.get("usage"):
            counted = usage.get("completion_tokens")
            found.prompt_len = usage.get("prompt_tokens") or found.prompt_len
        text = _text_of(event, backend)
        if text is None:
            continue
        if chunks:
            found.itl.append(now - last)
        else:
            found.ttft = now - found.start_time
        texts.append(text)
        last, chunks = now, chunks + 1
    if not ended or not chunks:
        raise ValueError("the stream broke off" if chunks else "the answer is empty")
    found.latency = last - found.start_time
    found.output_tokens = chunks if counted is None else counted
    found.text = "".join(texts)


def _text_of(event: dict[str, Any], backend: Backend) -> str | None:
    """The text of a chunk, perhaps none of a whole character; None where it stands for no token."""
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if backend == "openai":
        return choice.get("text") or ""
    delta = choice.get("delta") or {}
    parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    text = "".join(part for part in parts if isinstance(part, str))
    if text or delta.get("tool_calls") or choice.get("finish_reason"):
        return text
    return None  # the role alone


def _one_line(error: object) -> str:
    return " ".join(str(error).split()) or type(error).__name__
