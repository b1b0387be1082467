"""A check that runs a user's command on artifacts in which rewrites were left out."""

import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dsa_compile.artifact.writer import ArtifactWriter
from dsa_compile.errors import CompileError, UserError
from dsa_compile.ir.program import Level, Program
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.emit import emit
from dsa_compile.passes.selection import RUNTIME_REQUIRES
from dsa_compile.verify.bisect.search import Trial
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.execution.replay import PassRun, Replay, Rewrite
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights.checkpoint import Checkpoint

PLACE = "{artifact}"
_CANNOT_RUN = (126, 127)  # what a shell says of a command that it cannot run


def required_passes(replay: Replay) -> set[str]:
    """Names of the passes without which an artifact does not run."""
    runs = {run.step.name: run.step for run in replay.runs}
    needed: set[str] = set()
    todo = list(RUNTIME_REQUIRES)
    while todo:
        name = todo.pop()
        if name in runs and name not in needed:
            needed.add(name)
            todo += runs[name].requires
    return needed


class CommandCheck:
    """A command that exits with 0 on a good artifact and with anything else on a bad one.

    An artifact that lacks a pass that the runtime needs runs nowhere; their rewrites are made in
    every trial, as LLVM's ``-opt-bisect-limit`` leaves required passes on.

    Args:
        recompiled: the artifact.
        command: with ``{artifact}`` where the path of one goes.

    Raises:
        UserError: the command names no artifact.
    """

    subject = "the artifact as it is compiled"

    def __init__(self, recompiled: RecompiledArtifact, command: str) -> None:
        if PLACE not in command:
            raise UserError(f"--check {command!r}: say where the artifact goes with {PLACE}")
        self.key = f"command {command}"
        self._recompiled = recompiled
        self._command = command
        self._required = required_passes(recompiled.replay)
        runs = recompiled.replay.runs
        self._optional = [run for run in runs if run.step.name not in self._required]
        self.count = sum(len(run.sites) for run in self._optional)

    @property
    def required(self) -> Sequence[str]:
        """Names of the passes that are on in every trial, in order."""
        names = [run.step.name for run in self._recompiled.replay.runs]
        return [name for name in names if name in self._required]

    def rewrite(self, position: int) -> Rewrite:
        """See :class:`~dsa_compile.verify.bisect.criteria.Check`."""
        for run in self._optional:
            if position <= len(run.sites):
                return self._recompiled.replay.rewrite(run.first + position)
            position -= len(run.sites)
        raise IndexError(position)

    def trial(self, position: int) -> Trial:
        """Compile as far as ``position`` and run the command on the artifact."""
        with tempfile.TemporaryDirectory(prefix="dsa-bisect-") as folder:
            try:
                path = self.compile(position, Path(folder) / "artifact")
            except CompileError as error:
                return Trial(position, True, f"does not compile: {in_a_line(error)}")
            command = self._command.replace(PLACE, shlex.quote(str(path)))
            done = subprocess.run(command, shell=True, capture_output=True, check=False)
        if done.returncode in _CANNOT_RUN:
            raise UserError(f"--check: the shell cannot run {command!r}")
        return Trial(position, done.returncode != 0, f"exit status {done.returncode}")

    def compile(self, position: int, out: Path) -> Path:
        """Write an artifact with the first ``position`` rewrites that may be left out."""
        program = self.program(position)
        recompiled = self._recompiled
        checkpoint = None
        if program.config.weights != "none":
            layers = [entry.index for entry in program.layers]
            checkpoint = Checkpoint.open(recompiled.model_dir, program.spec, layers)
        with ArtifactWriter(out, False) as writer:
            emit(program, writer, recompiled.model_dir, checkpoint, bind_kernels(program))
        return out

    def program(self, position: int) -> Program:
        """The program of a trial."""
        exported = self._recompiled.exported
        mode = "none" if exported.config.weights == "none" else "reference"
        program = exported.fork(replace(exported.config, records=False, weights=mode))
        for run in self._recompiled.replay.runs:
            if run.step.name in self._required:
                run.step(program)
            elif position > 0:
                position -= self._some(run, program, position)
        program.level = Level.KERNEL
        return program

    @staticmethod
    def _some(run: PassRun, program: Program, limit: int) -> int:
        """Make up to ``limit`` rewrites; return how many the whole pass has."""
        whole = len(run.sites)
        run.step(program, min(limit, whole))
        return whole
