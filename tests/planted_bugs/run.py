"""Run a command with a fault planted in it and in the processes that it starts.

    python -m tests.planted_bugs.run FAULT -- dsa-inspect ARTIFACT verify
    python -m tests.planted_bugs.run FAULT -- python SCRIPT

Commands are those of the package: ``dsa-compile``, ``dsa-inspect``, ``dsa-generate``, …
"""

import runpy
import sys

from tests.planted_bugs.faults import fault_named


def main(name: str, command: list[str]) -> None:
    """Plant, and run a command as its own process would.

    Args:
        name: id of the fault.
        command: with its arguments.
    """
    fault_named(name).plant_here()
    program, *args = command
    if program == "python":
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")
        return
    module = f"dsa_compile.cli.{program.removeprefix('dsa-')}"
    sys.argv = [program, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        sys.exit((__doc__ or "").strip())
    main(sys.argv[1], sys.argv[3:])
