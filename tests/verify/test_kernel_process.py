"""A kernel that ends its process is named, and the others are checked all the same."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.errors import UserError
from dsa_compile.verify.checks.kernel_process import check_kernels_apart
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

PLANTED = """
import faulthandler, json, os, sys
from dsa_compile.verify.checks import kernel_by_op
from dsa_compile.verify.checks.kernel_process import main

right = kernel_by_op.load

def load(op, provider, target):
    function = right(op, provider, target)

    def kernel(*args):
        if op == "router":
            os.abort()
        made = function(*args)
        return made * 1.01 if op == "linear" else made

    return kernel

kernel_by_op.load = load
faulthandler.enable()
with os.fdopen(int(sys.argv[-1]), "w") as pipe:
    main(pipe, json.load(sys.stdin))
"""


@pytest.mark.slow
def test_a_crash_is_a_finding(recompiled: RecompiledArtifact, tmp_path: Path) -> None:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED, encoding="utf-8")
    prompt = recompiled.prompt(tokens=9)
    lines: list[str] = []
    command = (sys.executable, str(script))
    found = list(check_kernels_apart(recompiled, prompt, lines.append, command))
    wrong = {(r.op.split(".")[1], r.provider): r for r in found if r.problem and r.op != "layer"}
    assert wrong.keys() == {("router", "reference"), ("linear", "reference")}
    crash = wrong["router", "reference"]
    assert "ends the process (SIGABRT" in crash.problem
    assert crash.layer == 1
    assert {r.layer for r in found} == {"embed", 0, 1, "head"}, "goes on behind the crash"
    assert lines[-1].startswith("layer head")


ENDED = """
import json, os, signal, sys

json.load(sys.stdin)
place = {"op": "dsa.linear.default", "provider": "x", "region": "head", "node": "n", "layer": 0}
with os.fdopen(int(sys.argv[-1]), "w") as pipe:
    for line in ({"began": place}, {"report": {**place, "ratio": 0.5, "problem": ""}}, *LAST):
        pipe.write(json.dumps(line) + chr(10))
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize(("last", "problems"), [('{"ended": True}', 0), ("", 1)])
def test_a_crash_of_the_interpreter_as_it_shuts_down_accuses_no_kernel(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch, last: str, problems: int
) -> None:
    monkeypatch.setattr("dsa_compile.verify.checks.kernel_process._MOST_CRASHES", 1)
    command = (sys.executable, "-c", ENDED.replace("LAST", f"({last},)" if last else "()"))
    found = list(check_kernels_apart(recompiled, recompiled.prompt(tokens=9), command=command))
    assert sum(bool(report.problem) for report in found) == problems
    assert len(found) == 1 + problems


def test_a_child_that_does_not_start(recompiled: RecompiledArtifact) -> None:
    prompt = recompiled.prompt(tokens=9)
    command = (sys.executable, "-c", "raise SystemExit('no such thing')")
    with pytest.raises(UserError, match="ended with status 1: no such thing"):
        list(check_kernels_apart(recompiled, prompt, command=command))


def test_a_child_that_ends_before_it_is_told_what_to_do(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = subprocess.Popen

    def started(*args: Any, **options: Any) -> "subprocess.Popen[str]":
        process = start(*args, **options)
        process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    test_a_child_that_does_not_start(recompiled)
