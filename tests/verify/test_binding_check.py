"""``verify`` of what an artifact for the CPU binds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.cli.inspect import model as inspect_model
from dsa_compile.cli.inspect.command import main
from dsa_compile.kernels.registry import load
from dsa_compile.verify.checks import (
    kernel_by_op,
    kernel_check,
    verify_compilation,
    weight_check,
)
from dsa_compile.verify.checks.binding_check import runs_here
from dsa_compile.verify.checks.report import PassReport, VerifyReport
from dsa_compile.verify.checks.weight_check import WrongWeight
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


@pytest.fixture
def rewrites(recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch) -> VerifyReport:
    """Report of ``verify`` on rewrites, which are not run: all are right."""
    report = VerifyReport(27, (27,), 16)
    monkeypatch.setattr(inspect_model, "open_recompiled", lambda args, _=None: recompiled)
    monkeypatch.setattr(verify_compilation, "verify", lambda *args: report)
    return report


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are bound to a function that gives twice their result."""

    def loaded(op: str, *where: Any) -> Any:
        right = load(op, *where)
        assert right is not None
        return _doubled(right) if op == "rms_norm" else right

    monkeypatch.setattr(kernel_by_op, "load", loaded)


def _doubled(right: Any) -> Any:
    return lambda *args: 2 * right(*args)


@pytest.mark.usefixtures("rewrites")
def test_what_does_not_run_is_named(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_check, "bind", lambda *args, **options: _doubled(None))
    assert main([str(artifact), "verify"]) == 1
    assert "kernel layer by all (" in capsys.readouterr().out


@pytest.mark.usefixtures("rewrites", "wrong")
def test_what_is_bound_wrongly_is_named(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(artifact), "verify"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("1 wrong")
    assert "wrong:      kernel dsa.rms_norm.default by reference (" in out
    assert "unchecked:  kernels and" not in out


@pytest.mark.usefixtures("rewrites")
def test_each_is_told_where_all_is_right(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(artifact), "verify", "--json"]) == 0
    kernels = json.loads(capsys.readouterr().out)["kernels"]
    bound = json.loads((artifact / "manifest.json").read_text())["kernels"]
    assert {kernel["op"] for kernel in kernels} - {"layer"} <= bound.keys()
    assert ("layer", "all") in {(kernel["op"], kernel["provider"]) for kernel in kernels}


@pytest.mark.usefixtures("wrong")
def test_nothing_is_run_where_a_pass_is_wrong(
    artifact: Path, rewrites: VerifyReport, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrites.passes.append(PassReport("absorb_mla", "tolerance", 1, problem="differs"))
    assert main([str(artifact), "verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["kernels"] == []


@pytest.mark.parametrize(
    ("target", "options"),
    [("sm_90a", {}), ("cpu", {"stop_after": "absorb_mla"})],
)
def test_what_is_run_elsewhere_or_nowhere(
    recompiled: RecompiledArtifact, target: str, options: dict[str, Any]
) -> None:
    assert runs_here(recompiled)
    manifest = recompiled.artifact.manifest
    manifest = replace(manifest, target=target, compile=replace(manifest.compile, **options))
    artifact = replace(recompiled.artifact, manifest=manifest)
    assert not runs_here(replace(recompiled, artifact=artifact))


def test_a_weight_that_is_made_wrongly_is_told(
    artifact: Path,
    rewrites: VerifyReport,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever the rewrites read of it: loading is one thing, running another."""
    wrong = WrongWeight("layer_000", "self_attn.o_proj.weight", "Load(…)", "differs by 1.0e+00")
    monkeypatch.setattr(weight_check, "wrong_weights", lambda program, store: iter([wrong]))
    assert main([str(artifact), "verify", "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["weights"]
    assert told == "self_attn.o_proj.weight of layer_000: differs by 1.0e+00: Load(…)"
    assert main([str(artifact), "verify"]) == 1
    assert "weight self_attn.o_proj.weight of layer_000: differs" in capsys.readouterr().out
