"""Selections by scores in a coarser format than fp32, which no number of a graph shows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dsa_compile.cli.inspect import command
from dsa_compile.ops import indexer
from dsa_compile.verify.checks import selection_check
from dsa_compile.verify.checks.report import SELECTION, PassReport
from dsa_compile.verify.checks.selection_check import selection_report
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


def test_scores_in_fp32_select_rightly(recompiled: RecompiledArtifact) -> None:
    report = selection_report(recompiled.replay.final, recompiled.store, recompiled.prompt())
    assert (report.name, report.problem) == (SELECTION, "")


def test_scores_in_a_coarser_format_are_found(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_select_sequence", "_select_singles"):
        _score_coarsely(monkeypatch, name)
    report = selection_report(recompiled.replay.final, recompiled.store, recompiled.prompt())
    assert "dsa.paged_index_topk.default in layer 0 selects keys" in report.problem
    assert "roundings below the cut, by fp64 scores of its operands" in report.problem


@pytest.mark.slow
def test_the_command_looks_at_selections_last(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = PassReport(SELECTION, "tolerance", 0, problem="selects other keys")
    monkeypatch.setattr(selection_check, "selection_report", lambda *_: wrong)
    assert command.main([str(artifact), "verify", "--tokens", "27"]) == 1
    (artifact / "verify.json").unlink()
    out = " ".join(capsys.readouterr().out.split())
    assert "selection: selects other keys" in out
    assert f"next: dsa-inspect {artifact} bisect --against reference" in out  # it is no pass


def _score_coarsely(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Select by few bits of the queries."""
    whole = getattr(indexer, name)

    def coarse(q: Tensor, weights: Tensor, *rest: Any) -> Any:
        return whole(q.to(torch.float8_e4m3fn).to(q.dtype), weights, *rest)

    monkeypatch.setattr(indexer, name, coarse)
