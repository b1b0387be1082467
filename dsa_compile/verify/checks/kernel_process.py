"""Kernels checked in a process of their own: one that crashes is a finding, not the tool's end.

The child opens the artifact again and writes a line before every piece of work and one for what
came of it. If it dies, the last piece of work that it began is what killed it; another child goes
on without that kernel. One that dies after its last line, as the interpreter shuts down, accuses no
kernel.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.launch_arguments import checked_arguments
from dsa_compile.verify.checks.kernel_check import KernelReport, check_kernels
from dsa_compile.verify.inputs.prompt import Chunk, Part, Prompt
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

COMMAND = (sys.executable, "-X", "faulthandler", "-m", __name__)
_MOST_CRASHES = 8


def check_kernels_apart(
    recompiled: RecompiledArtifact,
    prompt: Prompt,
    progress: Callable[[str], None] = lambda line: None,
    command: Sequence[str] = COMMAND,
) -> Iterator[KernelReport]:
    """The reports of :func:`~dsa_compile.verify.checks.kernel_check.check_kernels`.

    Args:
        recompiled: the artifact; its target is this machine's device.
        prompt: what to run.
        progress: called with a line for each call of the plan.
        command: runs :func:`main`.

    Raises:
        UserError: the child ended for a reason that is no kernel.
    """
    skipped: list[tuple[str, str]] = []
    told: set[tuple[str, ...]] = set()
    for _ in range(_MOST_CRASHES):
        crash = None
        for entry in _child(recompiled, prompt, skipped, command):
            if "progress" in entry:
                progress(entry["progress"])
                continue
            report = KernelReport(**entry["report"])
            if entry["crash"]:
                crash = report
            elif (key := (report.op, report.provider, report.region, report.node,
                          str(report.layer), str(report.ratio))) not in told:  # fmt: skip
                told.add(key)
                yield report
        if crash is None:
            return
        yield crash
        skipped.append((crash.op, crash.provider))


def _child(
    recompiled: RecompiledArtifact,
    prompt: Prompt,
    skipped: Sequence[tuple[str, str]],
    command: Sequence[str],
) -> Iterator[dict[str, Any]]:
    asked = json.dumps(
        {
            "artifact": str(recompiled.artifact.path.absolute()),
            "model_dir": str(recompiled.model_dir.absolute()),
            "dummy": recompiled.dummy,
            "prompt": asdict(prompt),
            "skipped": list(skipped),
        }
    )
    began: dict[str, Any] | None = None
    ended = False
    read, write = os.pipe()
    with tempfile.TemporaryFile("w+") as errors, os.fdopen(read) as lines:
        process = subprocess.Popen(
            [*command, str(write)],
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            text=True,
            pass_fds=(write,),
        )
        os.close(write)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # one that has ended says why
                process.stdin.write(asked)
            for line in lines:
                entry = json.loads(line)
                if "began" in entry:
                    began = entry["began"]
                elif "ended" in entry:
                    ended = True
                else:
                    yield {"crash": False, **entry}
            status = process.wait()
        finally:
            process.kill()
            process.wait()
        if status == 0 or ended:  # libraries may crash as the interpreter shuts down
            return
        errors.seek(0)
        text = errors.read()
    if status > 0 or began is None:
        last = (text.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"the check of kernels ended with status {status}: {last}")
    where = next((x.strip() for x in text.splitlines() if x.strip().startswith("File ")), "")
    problem = f"ends the process ({signal.Signals(-status).name}{f', {where}' if where else ''})"
    report = asdict(KernelReport(**began, ratio=float("inf"), problem=problem))
    yield {"crash": True, "report": report}


def main(out: IO[str], asked: dict[str, Any]) -> None:
    """Run the check in this process.

    Args:
        out: takes a line for all that begins and all that is found.
        asked: the artifact, the prompt and the kernels to leave out.
    """

    def put(**entry: Any) -> None:
        out.write(json.dumps(entry) + "\n")
        out.flush()

    from dsa_compile.weights.dummy import DummyWeights

    dummy: bool = asked["dummy"]
    path, model = Path(asked["artifact"]), Path(asked["model_dir"])
    recompiled = RecompiledArtifact.open(path, model, dummy)
    manifest = recompiled.artifact.manifest
    on_gpu = manifest.target != "cpu"
    with checked_arguments():
        for report in check_kernels(
            recompiled.replay.final,
            manifest.kernels,
            manifest.target,
            DummyWeights() if dummy and on_gpu else recompiled.store.source,
            _prompt(asked["prompt"]),
            lambda line: put(progress=line),
            begins=lambda report: put(began=_place(report)),
            skipped=frozenset((op, provider) for op, provider in asked["skipped"]),
        ):
            put(report=asdict(report))
    if on_gpu:
        torch.cuda.synchronize()  # a kernel that fails late is still a kernel's fault
    put(ended=True)


def _place(report: KernelReport) -> dict[str, Any]:
    made = asdict(replace(report, problem=""))
    del made["ratio"], made["problem"]
    return made


def _prompt(data: dict[str, Any]) -> Prompt:
    chunks = tuple(
        Chunk(tuple(Part(**part) for part in chunk["parts"]), chunk["padding"])
        for chunk in data["chunks"]
    )
    return Prompt(tuple(map(tuple, data["requests"])), chunks, data["block_size"])


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[-1]), "w") as pipe:
        main(pipe, json.load(sys.stdin))
