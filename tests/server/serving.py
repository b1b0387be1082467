"""A real server as a subprocess, for tests that talk to it as clients do."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 300  # seconds; only a server that hangs takes them
CHECKOUT = (sys.executable, "-m", "dsa_compile.cli.serve")
_LISTENING = re.compile(r"listening on (http://[^\s\"]+)")


@dataclass
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """``dsa-serve`` in a process of its own; its log is kept as lines.

    Args:
        artifact: to serve.
        flags: more of its options.
        program: how it is called.
        more: further arguments of :class:`subprocess.Popen`.
    """

    def __init__(
        self, artifact: Path, *flags: str, program: Sequence[str] = CHECKOUT, **more: Any
    ) -> None:
        command = [*program, str(artifact), "--port", "0", *flags]
        more["env"] = {**more.get("env", os.environ), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **more)
        self.log: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for_log(_LISTENING).group(1)
        address = urlsplit(self.url)
        self.address = (address.hostname, address.port)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.log.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self.log.append("<end>")
            self._news.notify_all()

    def wait_for_log(self, pattern: re.Pattern[str] | str) -> re.Match[str]:
        """The first line that matches, now or later."""
        seen = 0
        with self._news:
            while True:
                for line in self.log[seen:]:
                    if found := re.search(pattern, line):
                        return found
                    assert line != "<end>", "\n".join(self.log)
                seen = len(self.log)
                assert self._news.wait(PATIENCE), "\n".join(self.log)

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request over a connection of its own; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE)
        try:
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
                headers = {"content-type": "application/json", **headers}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def post(self, path: str, **body: Any) -> Answer:
        return self.request("POST", path, body)

    def wait_until(self, path: str, status: int) -> Any:
        """Ask until the status is there; the JSON that came with it."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            answer = self.get(path)
            if answer.status == status:
                return answer.json()
            assert self.process.poll() is None, "\n".join(self.log)
            time.sleep(0.05)
        raise AssertionError(f"{path} is not {status}\n" + "\n".join(self.log))

    def metric(self, name: str, **headers: str) -> float:
        """The sum of a metric's samples."""
        lines = self.get("/metrics", **headers).body.decode().splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{| )", line)
        )

    def wait_for_idle(self) -> None:
        """Wait until no request has a block; fails if one is never given back."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if not self.metric("dsa:kv_cache_usage_perc") + self.metric("dsa:num_requests_running"):
                return
            time.sleep(0.05)
        raise AssertionError(self.get("/metrics").body.decode())

    def engine_pid(self) -> int:
        """The engine process: the server's only child."""
        task = f"/proc/{self.process.pid}/task"
        children = set()
        for tid in os.listdir(task):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended
                children.update(Path(task, tid, "children").read_text().split())
        (pid,) = map(int, children)
        return pid

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextmanager
def serving(artifact: Path, *flags: str, **more: Any) -> Iterator[Server]:
    """A server that is ready, and is gone afterwards."""
    server = Server(artifact, *flags, **more)
    try:
        server.wait_until("/ready", 200)
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(PATIENCE)


def events(body: bytes) -> list[Any]:
    """JSON of server-sent events; "[DONE]" as it is."""
    lines = body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]
