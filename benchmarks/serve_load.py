"""Load a real server with streaming clients and compare it with the engine in this process.

Prints, for the small trained model on the CPU: output tokens a second through HTTP and from
``Engine.generate`` of the same requests; the CPU time that the HTTP process takes for a request,
from as many answers of one token, and for each further token; the first token through HTTP and
through the engine; and checks that every completed answer equals the engine's and that every cache
block came back. Both engines have the threads that a server's engine has; on a machine that does
other work too, CPU times are comparable and the others are not.

    python benchmarks/serve_load.py --clients 64 --requests 256 --leave 0.1

With --seconds clients go on for that time, one request after another, and only the answers, the
blocks and the state of the server are checked:

    python benchmarks/serve_load.py --clients 256 --seconds 120
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "examples" / "tiny_v32" / "checkpoint"
TICK = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, help="default: the small model, compiled here")
    parser.add_argument("--clients", type=int, default=64, help="streams at the same time")
    parser.add_argument("--requests", type=int, default=256, help="in all")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--leave", type=float, default=0.1, help="share of clients that leave")
    parser.add_argument("--prompt", type=int, default=128, help="most tokens of a prompt")
    parser.add_argument("--seconds", type=float, help="go on for this time")
    parser.add_argument("--first", type=int, default=30, help="requests for the first token")
    options = parser.parse_args()
    from dsa_compile.server.engine_process import leave_a_core

    leave_a_core()
    from dsa_compile.runtime import Engine, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        artifact = options.artifact
        if artifact is None:
            import dsa_compile

            artifact = Path(folder, "tiny")
            dsa_compile.compile(str(CHECKPOINT), str(artifact), recipe="fp32")
        rng = random.Random(0)
        requests = [
            (
                [rng.randrange(10, 1500) for _ in range(length_of(rng, options.prompt))],
                rng.randrange(1, options.tokens + 1),
            )
            for _ in range(options.requests)
        ]
        engine = Engine.load(artifact)
        params = [SamplingParams(max_tokens=n, temperature=0.0) for _, n in requests]
        began = time.perf_counter()
        expected = [o.text for o in engine.generate([p for p, _ in requests], params)]
        seconds = time.perf_counter() - began
        tokens = sum(n for _, n in requests)
        print(f"engine alone:  {tokens / seconds:8.0f} tokens/s")
        if not options.seconds:
            alone = first_tokens_of_engine(engine, options.first)
        del engine
        process, address = start(artifact)
        try:
            if options.seconds:
                asyncio.run(endure(address, requests, expected, options))
            else:
                asyncio.run(measure(process, address, requests, expected, options, alone))
        finally:
            process.terminate()
        assert process.wait() == 0, "the server did not drain"


def length_of(rng: random.Random, most: int) -> int:
    """Draw a length: each order of magnitude is as likely as any other."""
    return int(most ** rng.random())


async def endure(address, requests, expected, options) -> None:
    """Have every client send requests until the time is over, a share of which it leaves."""
    rng = random.Random(1)
    end = time.monotonic() + options.seconds
    done = left = tokens = 0

    async def client() -> None:
        nonlocal done, left, tokens
        while time.monotonic() < end:
            n = rng.randrange(len(requests))
            prompt, length = requests[n]
            leaves = rng.randrange(length) if rng.random() < options.leave else None
            text, count = "", 0
            async with contextlib.aclosing(stream(address, prompt, length)) as chunks:
                async for chunk in chunks:
                    if count == leaves:
                        break
                    text += chunk["choices"][0]["text"]
                    count += 1
                else:
                    assert text == expected[n], f"request {n}: {text!r}, not {expected[n]!r}"
                    leaves = None
            left, done = left + (leaves is not None), done + (leaves is None)
            tokens += count

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(options.clients):
            group.create_task(client())
    seconds = time.monotonic() - began
    await wait_for_idle(address)
    health = (await get(address, "/health")).partition("\r\n\r\n")[2]
    assert json.loads(health) == {"status": "ready", "restarts": 0}, health
    page = await get(address, "/metrics")
    for name in ("num_requests_running", "num_requests_waiting", "engine_failed_steps_total"):
        assert re.search(rf"^dsa:{name}\{{.*\}} 0\.0$", page, re.MULTILINE), name
    assert 'finished_reason="error"' not in page
    print(
        f"{options.clients} clients for {seconds:.0f} s: {done} answers, all equal to the "
        f"engine's, {left} left, {tokens / seconds:.0f} chunks/s; every block came back"
    )


def start(artifact: Path) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    """A server on a free port, ready."""
    command = [sys.executable, "-m", "dsa_compile.cli.serve", str(artifact), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--log-level", "info"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    url = None
    for line in process.stderr:
        if found := re.search(r"listening on (\S+)", line):
            url = urlsplit(found.group(1))
        if "the engine is ready" in line:
            break
    assert url is not None
    assert url.hostname is not None
    assert url.port is not None
    # Its log goes on; nobody reads the pipe to its end otherwise.
    threading.Thread(target=process.stderr.read, daemon=True).start()
    return process, (url.hostname, url.port)


async def measure(process, address, requests, expected, options, alone) -> None:
    first = [await first_token(address) for _ in range(options.first)]
    print(
        f"first token:   {1e3 * statistics.median(first):8.1f} ms through HTTP, "
        f"{1e3 * alone:.1f} ms from the engine"
    )
    rng = random.Random(1)
    leavers = {n for n in range(len(requests)) if rng.random() < options.leave}
    gate = asyncio.Semaphore(options.clients)
    events = 0

    async def one(n: int) -> str | None:
        nonlocal events
        prompt, length = requests[n]
        async with gate:
            leaves = rng.randrange(length) if n in leavers else None
            text, count = "", 0
            async for chunk in stream(address, prompt, length):
                if leaves is not None and count >= leaves:
                    return None
                text += chunk["choices"][0]["text"]
                count += 1
                events += 1
            return text

    async def one_token(prompt: list[int]) -> None:
        async with gate:
            async for _ in stream(address, prompt, 1):
                pass

    before = cpu_seconds(process.pid)
    await asyncio.gather(*(one_token(prompt) for prompt, _ in requests))
    a_request = (cpu_seconds(process.pid) - before) / len(requests)
    before, began = cpu_seconds(process.pid), time.perf_counter()
    found = await asyncio.gather(*(one(n) for n in range(len(requests))))
    seconds = time.perf_counter() - began
    used = cpu_seconds(process.pid) - before
    wrong = [n for n, text in enumerate(found) if text is not None and text != expected[n]]
    assert not wrong, f"{len(wrong)} answers differ from the engine's: {wrong[:5]}"
    await wait_for_idle(address)
    print(
        f"through HTTP:  {events / seconds:8.0f} tokens/s, {options.clients} clients, "
        f"{sum(text is None for text in found)} of {len(found)} left, all other answers equal"
    )
    a_token = (used - a_request * len(requests)) / max(events - len(requests), 1)
    print(
        f"HTTP process:  {1e6 * used / events:8.0f} us of CPU time a token in all: "
        f"{1e6 * a_request:.0f} us a request and {1e6 * a_token:.0f} us a further token"
    )


def cpu_seconds(pid: int) -> float:
    """CPU time of a process without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def first_tokens_of_engine(engine, count: int) -> float:
    from dsa_compile.runtime import SamplingParams

    times = []
    for n in range(count):
        began = time.perf_counter()
        engine.add_request(f"first-{n}", [5, 6, 7], SamplingParams(max_tokens=1, temperature=0.0))
        while engine.has_unfinished():
            engine.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


async def first_token(address: tuple[str, int]) -> float:
    began = time.perf_counter()
    async for _ in stream(address, [5, 6, 7], 1):
        return time.perf_counter() - began
    raise AssertionError("no token came")


async def stream(address: tuple[str, int], prompt: list[int], length: int):
    """Chunks of a streamed completion, over a connection of its own."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        body = json.dumps(
            {"prompt": prompt, "max_tokens": length, "temperature": 0, "stream": True}
        ).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        assert status.split()[1] == b"200", status
        async for line in reader:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
            elif line.startswith(b"data: [DONE]"):
                return
        raise AssertionError("the stream broke off")
    finally:
        writer.close()


async def get(address: tuple[str, int], path: str) -> str:
    """A response, its head included."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    page = (await reader.read()).decode()
    writer.close()
    return page


async def wait_for_idle(address: tuple[str, int]) -> None:
    """Wait until no cache block is in use."""
    while True:
        page = await get(address, "/metrics")
        if re.search(r"^dsa:kv_cache_usage_perc\{.*\} 0\.0$", page, re.MULTILINE):
            return
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
