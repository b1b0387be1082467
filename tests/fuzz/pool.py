"""Workers, cases for them, and findings: made small, told apart, saved."""

import json
import os
import re
import selectors
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.fuzz.cases import Case

_OUR_PLACE = r'File "[^"]*?/((?:dsa_compile|runtime|passes|lowering)/[^"]+)", line (\d+)'
WALL_SECONDS = 300  # of a case: it waits for something that never comes


@dataclass(frozen=True)
class Result:
    """Result of a case: its outcome, or what is wrong and where."""

    case: Case
    outcome: str
    problem: str = ""
    trace: str = ""

    @property
    def key(self) -> str:
        """Key, equal for findings that are probably equal: the error's type and its last lines."""
        places = re.findall(_OUR_PLACE, self.trace)
        where = places[-1:] or self.problem[:60]
        return f"{self.case.target} {self.problem.partition(':')[0]} {where}"


class Worker:
    """One process of :mod:`tests.fuzz.worker`, started anew when a case ended it."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, case: Case) -> Result:
        """Run a case; what ends the process is a result like any other."""
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(case)).encode() + b"\n")
        process.stdin.flush()
        answer = self._answer(process)
        if answer is not None:
            return Result(case, answer["outcome"], answer["problem"], answer["trace"])
        process.kill()
        status = process.wait()
        self._process = None
        problem = f"process ended: {'no answer' if status == -9 else f'signal {-status}'}"
        return Result(case, "", problem, "")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> "subprocess.Popen[bytes]":
        root = Path(__file__).parents[2]
        path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(self._base)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=root,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            bufsize=0,
        )
        ready = self._answer(process)
        assert ready is not None, "a worker does not start"
        return process

    @staticmethod
    def _answer(process: "subprocess.Popen[bytes]") -> dict[str, str] | None:
        """The next line, or None if the process ends or says nothing for too long."""
        assert process.stdout is not None
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(WALL_SECONDS):
                    return None
                piece = process.stdout.read(1 << 16)
                if not piece:
                    return None
                line += piece
        answer: dict[str, str] = json.loads(line)
        return answer


def minimised(result: Result, worker: Worker) -> Result:
    """Finding with as few mutations as still show it."""
    for step in result.case.steps:
        steps = tuple(each for each in result.case.steps if each != step)
        if steps:
            smaller = worker.run(replace(result.case, steps=steps))
            if smaller.problem and smaller.key.partition(" ")[2] == result.key.partition(" ")[2]:
                result = smaller
    return result


def save(result: Result, folder: Path) -> Path:
    """Write a finding so that ``python -m tests.fuzz.run --replay FILE`` repeats it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.case.target}-{result.case.seed}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return path
