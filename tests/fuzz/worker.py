"""A process that runs cases: one JSON object a line on standard input, one result a line back.

It has limits of memory and of processor time a case. A case that hangs, dies or uses too much takes
this process with it; whoever started it sees which case that was.
"""

import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path

from tests.fuzz.cases import Case
from tests.fuzz.targets import run_case

CPU_SECONDS = 60  # a case; the slowest sound ones take three
_MEMORY = 3 << 30  # beyond what the process has when it begins


def main() -> None:
    """Serve until standard input ends."""
    base = Path(sys.argv[1])
    faulthandler.register(signal.SIGUSR1)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a case prints must not be taken for an answer
    import torch

    import dsa_compile.lowering.compile_model
    import dsa_compile.runtime  # noqa: F401

    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        data = json.loads(line)
        case = Case(data["target"], data["seed"], tuple(data["steps"]))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process
        work = Path(tempfile.mkdtemp(prefix="fuzz-"))
        answer = {"outcome": "", "problem": "", "trace": ""}
        try:
            answer["outcome"] = run_case(case, base, work)
        except BaseException as error:
            answer["problem"] = f"{type(error).__name__}: {error}"[:400]
            answer["trace"] = "".join(traceback.format_exception(error, limit=-12))[-4000:]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            shutil.rmtree(work, ignore_errors=True)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
