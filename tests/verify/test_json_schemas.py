"""``--json`` of ``verify`` and ``bisect`` has the keys and types of the tables in the docs."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.cli.inspect import model as inspect_model
from dsa_compile.cli.inspect.command import main
from dsa_compile.cli.inspect.verify_kernels import run_kernels
from dsa_compile.verify.checks import kernel_check, kernel_process
from dsa_compile.verify.checks.kernel_check import KernelReport
from dsa_compile.verify.checks.report import HazardReport, VerifyReport
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

PAGE = Path(__file__).parents[2] / "docs" / "debugging.md"
_NAMES = {str: "text", bool: "bool", int: "int", float: "number", type(None): "null"}


def documented(command: str) -> dict[str, set[str]]:
    """Types by key, of the table behind ``Keys of `COMMAND --json` ``."""
    table = PAGE.read_text(encoding="utf-8").partition(f"Keys of `{command} --json`")[2]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", table.partition("\n\n\n")[0], re.MULTILINE)
    wanted: dict[str, set[str]] = {}
    for key, types in rows:
        if key in wanted:
            break  # the next table
        wanted[key] = {name.strip() for name in types.split("or")}
    return wanted


def found(value: Any, path: str = "") -> dict[str, set[str]]:
    """Types by key of JSON; ``[]`` stands for the entries of a list, ``{}`` of a table."""
    if isinstance(value, dict):
        total: dict[str, set[str]] = {}
        for key, entry in value.items():
            inner = f"{path}{{}}" if path == "passes[].layers" else f"{path}.{key}".lstrip(".")
            for name, types in found(entry, inner).items():
                total.setdefault(name, set()).update(types)
        return total
    if isinstance(value, list):
        total = {}
        for entry in value:
            for name, types in found(entry, f"{path}[]").items():
                total.setdefault(name, set()).update(types)
        return total
    return {path: {_NAMES[type(value)]}}


def check(command: str, data: dict[str, Any], missing: set[str]) -> None:
    """Every key is documented with its type, and of those documented only ``missing`` are not."""
    wanted, given = documented(command), found(data)
    assert given.keys() <= wanted.keys()
    assert wanted.keys() - given.keys() == missing
    for key, types in given.items():
        assert types <= wanted[key], key


@pytest.fixture
def opened(recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_model, "open_recompiled", lambda args, _=None: recompiled)


@pytest.mark.usefixtures("opened")
def test_verify(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--pass", "absorb_mla", "--pass", "pack_swiglu", "--json", "--tokens", "27"]
    assert main([str(artifact), "verify", *args]) == 0
    data = json.loads(capsys.readouterr().out)
    hazard = VerifyReport(1, (1,), 1, hazards=[HazardReport("a", 1, ("b", "c"), "d")])
    data["hazards"] = hazard.to_json()["hazards"]
    data["emission"] = ["graph dense is not what the passes make"]
    data["weights"] = ["norm.weight of head: differs by 1.0e+00: Load(…)"]
    kernel = KernelReport("dsa.rms_norm.default", "reference", "moe.long", "rms_norm", 3, 0.5)
    data["kernels"] = VerifyReport(1, (1,), 1, kernels=[kernel]).to_json()["kernels"]
    assert data["version"] == 2
    check("verify", data, set())


def test_verify_of_kernels(
    recompiled: RecompiledArtifact,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a GPU: an artifact that says it is for one, and a check that finds nothing."""
    manifest = replace(recompiled.artifact.manifest, target="sm_90a")
    artifact = replace(recompiled.artifact, manifest=manifest)
    monkeypatch.setattr(kernel_check, "device_problem", lambda target: "")
    monkeypatch.setattr(kernel_process, "check_kernels_apart", lambda *given: iter(()))
    monkeypatch.setattr(RecompiledArtifact, "problems", lambda self: [])
    args = argparse.Namespace(only=None, tokens=27, json=True)
    assert run_kernels(args, replace(recompiled, artifact=artifact), None) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == {"version": 1, "ok": True, "kernels": [], "emission": []}


@pytest.mark.usefixtures("opened")
def test_bisect(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = "! grep -rq swiglu_packed {artifact}/graphs"
    args = ["--check", command, "--json", "--tokens", "27", "--out", str(tmp_path)]
    assert main([str(artifact), "bisect", *args]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["version"] == 3
    data["untested"] = ["kernels: no GPU here"]
    data["findings"] = [{"layer": 1, "problem": "differs"}, {"layer": "head", "problem": ""}]
    check("bisect", data, set())
