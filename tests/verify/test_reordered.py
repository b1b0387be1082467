"""Another order of fp32 sums or products is noted; what is wrong is accused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsa_compile.ops import REFERENCE, norm
from dsa_compile.verify.checks.report import PassReport, VerifyReport
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

PASS = "recognize_rms_norm"


def checked(
    recompiled: RecompiledArtifact,
    monkeypatch: pytest.MonkeyPatch,
    norm_of: Callable[[Tensor, Tensor, float], Tensor],
) -> tuple[VerifyReport, PassReport]:
    """Report of ``verify`` with another implementation of the norm."""
    op = torch.ops.dsa.rms_norm.default
    assert REFERENCE[op] is norm.rms_norm
    monkeypatch.setattr(norm.rms_norm, "__code__", norm_of.__code__)
    report = verify(recompiled.replay, recompiled.store, recompiled.prompt(None, 24), [PASS])
    (done,) = report.passes
    return report, done


def test_another_order_of_a_product_is_a_note(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reordered(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * (inverse * weight)).contiguous()

    report, done = checked(recompiled, monkeypatch, reordered)
    assert report.ok, report.wrong
    assert "promises equal bits; at site" in done.note


def test_a_little_more_than_order_is_wrong(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * (inverse * weight)).mul(1.0000005).contiguous()

    report, done = checked(recompiled, monkeypatch, off)
    assert done.problem
    assert done.note == ""
    assert {site.pass_name for site in report.wrong} == {PASS}
