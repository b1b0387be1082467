"""A hunt of docs/debugging.md: ``python tests/docs/hunt.py kernel FOLDER [COMMAND]``.

A fault is planted in a copy of the compiler, a model is compiled with it, and the commands of the
hunt are run with it, or one of them; their output follows each. Faults are those of
tests/planted_bugs/second, and that of the walk-through.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.docs import swapped_norm  # noqa: E402
from tests.planted_bugs.second import faults_ops, faults_runtime  # noqa: E402
from tests.planted_bugs.second.fault import copy_package  # noqa: E402

_BISECT, _REPRODUCE = "bisect --against reference", "reproduce.py"


def _planted(name: str) -> Callable[[Path], None]:
    faults = (*faults_ops.FAULTS, *faults_runtime.FAULTS)
    return next(fault.plant for fault in faults if fault.id == name)


def _experts_of_another_rank(compiler: Path) -> None:
    """Plant that each rank takes the numbers of the experts that the other one has."""
    copy_package(compiler)
    file = compiler / "passes" / "shard_experts.py"
    text, right = file.read_text(encoding="utf-8"), "for rank in range(layout.ep)"
    assert text.count(right) == 1, f"{file} no longer has {right}"
    file.write_text(text.replace(right, "for rank in reversed(range(layout.ep))"), encoding="utf-8")


@dataclass(frozen=True)
class Hunt:
    """A fault, how a model is compiled with it, and the commands that find it."""

    plant: Callable[[Path], None]
    commands: tuple[str, ...]
    options: str = ""


HUNTS = {
    "pass": Hunt(swapped_norm.plant, ("verify", _BISECT, _REPRODUCE)),
    "kernel": Hunt(_planted("group-score-is-the-best"), ("verify", _BISECT)),
    "cache": Hunt(_planted("prefix-key-of-two-ends"), (_BISECT,)),
    "ranks": Hunt(
        _experts_of_another_rank, ("verify --against-unsharded", _BISECT), " --tp 2 --ep 2"
    ),
}


def main(name: str, folder: Path, wanted: str = "") -> None:
    """Plant and compile, if that is not done, and run the commands that start as ``wanted``."""
    hunt = HUNTS[name]
    compiler, artifact, found = folder / "compiler", folder / "artifact", folder / "bisect"
    if not artifact.exists():
        hunt.plant(compiler)
        model = ROOT / "examples" / "tiny_v32" / "checkpoint"
        options = f"{model} -o {artifact} --target cpu --quiet{hunt.options}"
        _run(compiler, f"-m dsa_compile.cli.compile {options}")
    for command in (each for each in hunt.commands if each.startswith(wanted)):
        if command == _REPRODUCE:
            script = found / "reproducer" / command
            print(f"+ python {script}", flush=True)
            _run(compiler, str(script))
            continue
        print(f"+ dsa-inspect {artifact} {command}", flush=True)
        out = f" --out {found}" if command == _BISECT else ""
        _run(compiler, f"-m dsa_compile.cli.inspect {artifact} {command}{out}")


def _run(compiler: Path, command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(compiler.resolve()), "COLUMNS": "80"}
    subprocess.run([sys.executable, "-P", *command.split()], env=environment, check=False)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
