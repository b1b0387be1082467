"""Fuzz for as long as one likes: ``python -m tests.fuzz.run --minutes 60 --jobs 4``.

Prints findings as they come, each once, minimised and saved; exit status 1 if there were any.
"""

import argparse
import json
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.bases import make_bases
from tests.fuzz.cases import Case
from tests.fuzz.pool import Result, Worker, minimised, save
from tests.fuzz.targets import TARGETS


class Fuzzing:
    """Jobs that draw cases until a time, and what they found."""

    def __init__(self, base: Path, targets: list[str], first: int, until: float, out: Path) -> None:
        self._base, self._targets, self._until, self._out = base, targets, until, out
        self._next = first
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.findings: dict[str, Result] = {}

    def job(self) -> None:
        """Run cases with a worker of its own."""
        worker = Worker(self._base)
        try:
            while time.monotonic() < self._until:
                with self._lock:
                    seed, self._next = self._next, self._next + 1
                result = worker.run(Case.of(self._targets[seed % len(self._targets)], seed))
                self._note(result, worker)
        finally:
            worker.close()

    def _note(self, result: Result, worker: Worker) -> None:
        outcome = "finding" if result.problem else result.outcome.partition(":")[0]
        with self._lock:
            self.counts[f"{result.case.target} {outcome}"] += 1
            known = not result.problem or result.key in self.findings
            if not known:
                self.findings[result.key] = result
        if not known:
            smallest = minimised(result, worker)
            path = save(smallest, self._out)
            print(f"{smallest.case}\n  {smallest.problem}\n  {path}", flush=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1, help="processes beside this one")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only these")
    parser.add_argument("--seed", type=int, help="the first; default: a fresh one")
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"), help="for findings")
    parser.add_argument("--base", type=Path, help="where the sound artifacts are kept between runs")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="repeat one finding")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-base-") as scratch:
        base = (args.base or Path(scratch)).absolute()
        base.mkdir(parents=True, exist_ok=True)
        if not (base / "reference").exists():
            make_bases(base)
        if args.replay:
            return _replay(args.replay, base)
        first = secrets.randbelow(2**40) if args.seed is None else args.seed
        print(f"first seed {first}", flush=True)
        until = time.monotonic() + 60 * args.minutes
        fuzzing = Fuzzing(base, args.target or list(TARGETS), first, until, args.out)
        jobs = [threading.Thread(target=fuzzing.job) for _ in range(args.jobs)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join()
    for name, count in sorted(fuzzing.counts.items()):
        print(f"{count:8} {name}")
    print(f"{len(fuzzing.findings)} findings in {sum(fuzzing.counts.values())} cases")
    return 1 if fuzzing.findings else 0


def _replay(file: Path, base: Path) -> int:
    data = json.loads(file.read_text())["case"]
    worker = Worker(base)
    result = worker.run(Case(data["target"], data["seed"], tuple(data["steps"])))
    worker.close()
    print(result.outcome or f"{result.problem}\n{result.trace}")
    return 1 if result.problem else 0


if __name__ == "__main__":
    sys.exit(main())
