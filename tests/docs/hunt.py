"""A hunt of docs/debugging.md: ``python tests/docs/hunt.py kernel FOLDER [COMMAND]``.

A model is compiled with a fault of tests/planted_bugs, and the commands of the hunt, or one of
them, are run with the fault in them; their output follows each. ``walk GOOD BAD`` compiles the two
artifacts of the walk-through, the second one with its fault.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "tiny_v32" / "checkpoint"
_BISECT, _REPRODUCE = "bisect --against reference", "reproduce.py"


@dataclass(frozen=True)
class Hunt:
    """A fault, how a model is compiled with it, and the commands that find it."""

    fault: str
    commands: tuple[str, ...]
    options: str = ""


HUNTS = {
    "pass": Hunt("add-norm-results-swapped", ("verify", _BISECT, _REPRODUCE)),
    "kernel": Hunt("group-score-is-the-best", ("verify", _BISECT)),
    "cache": Hunt("prefix-key-of-two-ends", (_BISECT,)),
    "ranks": Hunt(
        "experts-of-the-other-rank", ("verify --against-unsharded", _BISECT), " --tp 2 --ep 2"
    ),
}


def main(name: str, folder: Path, wanted: str = "") -> None:
    """Compile, if that is not done, and run the commands that start as ``wanted``."""
    hunt = HUNTS[name]
    artifact, found = folder / "artifact", folder / "bisect"
    if not artifact.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(hunt.fault, artifact, hunt.options)
    for command in (each for each in hunt.commands if each.startswith(wanted)):
        if command == _REPRODUCE:
            script = found / "reproducer" / command
            print(f"+ python {script}", flush=True)
            _run(hunt.fault, f"python {script}")
            continue
        print(f"+ dsa-inspect {artifact} {command}", flush=True)
        out = f" --out {found}" if command == _BISECT else ""
        _run(hunt.fault, f"dsa-inspect {artifact} {command}{out}")


def _compile(fault: str, artifact: Path, options: str = "") -> None:
    _run(fault, f"dsa-compile {MODEL} -o {artifact} --target cpu --quiet{options}")


def _run(fault: str, command: str) -> None:
    """Run a command, with a fault if one is named."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    program, *args = command.split()
    planted = [sys.executable, "-P", "-m", "tests.planted_bugs.run", fault, "--", program]
    right = [sys.executable, "-P", "-m", f"dsa_compile.cli.{program.removeprefix('dsa-')}"]
    subprocess.run([*(planted if fault else right), *args], env=environment, check=False)


if __name__ == "__main__":
    if sys.argv[1] == "walk":
        good, bad = map(Path, sys.argv[2:])
        _compile("", good)
        _compile(HUNTS["pass"].fault, bad)
    else:
        main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
