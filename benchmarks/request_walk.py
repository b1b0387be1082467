"""Files and functions that a request passes, from the HTTP route to its first token, and one
decode step: traced over a small model on the CPU, with the server and its engine in one process.

    python benchmarks/request_walk.py ARTIFACT
"""

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import zmq

from dsa_compile.runtime import Engine
from dsa_compile.server.admission import Admission
from dsa_compile.server.app import create_app
from dsa_compile.server.artifact_text import load_artifact_text
from dsa_compile.server.engine_client import EngineClient
from dsa_compile.server.engine_loop import EngineLoop
from dsa_compile.server.metrics import Metrics
from dsa_compile.server.service import Service
from dsa_compile.server.settings import Settings

ROOT = Path(__file__).parents[1]
PARTS = ("runtime/", "dsa_compile/server/")


class Walk:
    """Functions of the server and the runtime in the order of their first calls."""

    def __init__(self) -> None:
        self.on = False
        self.passed: dict[tuple[str, str], int] = {}

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> None:
        code = frame.f_code
        if self.on and kind == "call" and code.co_filename.startswith(f"{ROOT}/"):
            file = code.co_filename[len(f"{ROOT}/") :]
            # Comprehensions and lambdas are parts of the functions that have them.
            if file.startswith(PARTS) and not code.co_name.startswith("<"):
                at = file, code.co_qualname.replace(".<locals>", "")
                self.passed[at] = self.passed.get(at, 0) + 1

    def take(self) -> list[tuple[str, str]]:
        """What was passed since the last call."""
        found, self.passed = list(self.passed), {}
        return found


async def post(app: Any, body: dict[str, Any]) -> None:
    """One request over ASGI."""
    data = json.dumps(body).encode()
    waiting = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 200) == 200, message

    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers,
             "query_string": b"", "http_version": "1.1", "asgi": {"version": "3.0"},
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "scheme": "http",
             "root_path": "", "raw_path": b"/v1/completions"}  # fmt: skip
    await app(scope, receive, send)


async def serve(artifact: Path, address: str, walk: Walk) -> tuple[list[Any], list[Any]]:
    """The walks of a prompt with its first token, and of one decode step."""
    client = EngineClient(address, lambda stats: None)
    socket = zmq.Context().socket(zmq.PAIR)
    socket.connect(address)
    engine = Engine.load(artifact, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    loop = EngineLoop(engine, socket)
    threading.Thread(target=loop.run, daemon=True).start()
    await client.ready()
    receiving = asyncio.create_task(client.receive())
    supervisor: Any = SimpleNamespace(engine=client)
    text = load_artifact_text(artifact)
    admission = Admission(8, 10_000)
    app = create_app(Service(Settings(artifact), text, supervisor, admission, Metrics("walk")))
    found = []
    for tokens in (1, 2, 3):
        body = {"prompt": "import os", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        await post(app, body)  # whatever happens once only
        walk.on = True
        await post(app, body)
        walk.on = False
        counts = dict(walk.passed)
        found.append((walk.take(), counts))
    receiving.cancel()
    (first, _), (_, two), (_, three) = found
    return first, [at for at, count in three.items() if count > two.get(at, 0)]


def show(title: str, walk: Iterable[tuple[str, str]]) -> None:
    """Files in the order in which they are entered, with their functions."""
    files: dict[str, list[str]] = {}
    for file, name in walk:
        files.setdefault(file, []).append(name)
    print(f"{title}: {len(files)} files, {sum(map(len, files.values()))} functions")
    for file, names in files.items():
        print(f"  {file}: {', '.join(names)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    artifact = parser.parse_args().artifact
    walk = Walk()
    threading.setprofile(walk)
    sys.setprofile(walk)
    with tempfile.TemporaryDirectory() as folder:
        first, decode = asyncio.run(serve(artifact, f"ipc://{folder}/engine", walk))
    sys.setprofile(None)
    show("a prompt to its first token", first)
    show("a decode step", decode)


if __name__ == "__main__":
    main()
