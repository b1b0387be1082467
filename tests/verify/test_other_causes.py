"""Causes that are no rewrite, each planted: what is wrong with them is led to by one command."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.passes.recognize_layer_norm import RecognizeLayerNorm
from dsa_compile.verify.bisect import other_causes
from dsa_compile.verify.bisect.bisect_artifact import bisect_artifact
from dsa_compile.verify.bisect.culprit import Cause, Culprit
from dsa_compile.verify.checks import verify_compilation, weight_check
from dsa_compile.verify.checks.kernel_check import KernelReport
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.checks.weight_check import WrongWeight, wrong_new_weights
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.reference import export_report
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights import materialize, stored
from dsa_compile.weights.block_fp8 import quantize_rows
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.plan import (
    Concat,
    Constant,
    Load,
    QuantizedValues,
    Shard,
    WeightEntry,
    WeightPlan,
)

LENGTH = 27


def causes_of(artifact: Any) -> other_causes.OtherCauses:
    """Result of the checks, one after the other."""
    checks = other_causes.other_checks(artifact, None)  # type: ignore[arg-type]
    return other_causes.other_causes(check() for check in checks)


def test_merged_weights_in_another_order(
    recompiled: RecompiledArtifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = materialize._write_parts

    def reversed_parts(expr: Any, variables: Any, reader: Any, out: Any, window: Any) -> None:
        whole(replace(expr, parts=expr.parts[::-1]), variables, reader, out, window)

    monkeypatch.setattr(materialize, "_write_parts", reversed_parts)
    mine = replace(recompiled, store=WeightStore(recompiled.store.source))  # nothing made yet
    prompt = mine.prompt(tokens=LENGTH)
    report = verify(mine.replay, mine.store, prompt, {"merge_projections"})
    assert report.wrong
    told = "; weight self_attn.q_a_k_kv_a.weight of layer_000 differs by "
    assert any(told in site.problem for site in report.wrong), report.wrong[0].problem
    found: Culprit = bisect_artifact(mine, prompt, None, None, None, tmp_path, lambda _: None)
    assert found.rewrite is None
    assert found.cause is Cause.WEIGHT
    assert "from its expression: " in found.problem


def test_a_weight_quantised_wrongly_names_what_quantises(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "{layer}.self_attn.o_proj.weight"
    call = next(call for call in recompiled.exported.calls if call.layer == 0)
    shape = recompiled.exported.weights.entries(call.kind)["self_attn.o_proj.weight"].shape
    plan = WeightPlan()
    plan.define(call.kind, key, WeightEntry("float8_e4m3fn", shape, QuantizedValues(Load(key))))

    def wrong() -> list[WrongWeight]:
        store = WeightStore(recompiled.store.source)
        return list(wrong_new_weights(call, WeightPlan(), plan, store))

    assert wrong() == []

    def halved(wide: Tensor) -> tuple[Tensor, Tensor]:
        values, scale = quantize_rows(wide)
        return (values.float() / 2).to(values.dtype), scale

    for module in (materialize, stored):
        monkeypatch.setattr(module, "quantize_rows", halved)
    (found,) = wrong()
    assert found.problem == "differs by 5.0e-01 from its expression"
    assert found.expression.endswith(", quantised by quantize_rows (weights/block_fp8.py)")


def test_a_part_of_a_weight_is_named_by_the_ranks_that_have_it() -> None:
    tp, dp = Shard("tp", 2, 0, 4, Load("w")), Shard("dp", 2, 0, 4, Load("w"))
    whole = Load("w")
    named = [weight_check._where(expr, 1) for expr in (tp, dp, Concat(0, (tp, dp)))]
    assert named == [" on the ranks with tp 1", " on the ranks with dp 1", " on rank 1"]
    assert weight_check._where(whole, 0) == ""


def test_weights_read_otherwise_than_by_transformers(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found before any pass is tried: the layer differs, and so does one of its weights."""
    read = Checkpoint.read_into

    def shifted(checkpoint: Checkpoint, name: str, out: Tensor, window: Any = ()) -> None:
        read(checkpoint, name, out, window)
        if name.endswith("mlp.experts.down_proj"):
            out.copy_(out.roll(1, 0))

    monkeypatch.setattr(Checkpoint, "read_into", shifted)
    mine = RecompiledArtifact.open(artifact)
    prompt = mine.prompt(tokens=LENGTH)
    found = bisect_artifact(mine, prompt, None, None, None, tmp_path, lambda _: None)
    assert (found.cause, found.name) == (Cause.WEIGHT, "model.layers.1.mlp.experts.down_proj")
    problem = export_report(mine, prompt).problem
    assert "layer 1 differs from transformers' model" in problem
    assert "weight model.layers.1.mlp.experts.down_proj is read differently" in problem


def test_constants_that_the_export_computes_otherwise(
    recompiled: RecompiledArtifact, tmp_path: Path
) -> None:
    """No weight that is read: whoever looks for it in the checkpoint finds nothing."""
    exported, key = recompiled.exported.fork(recompiled.exported.config), "rotary_emb.inv_freq"
    for kind in [k for k in exported.weights.kinds() if key in exported.weights.entries(k)]:
        entry = exported.weights.remove(kind, key)
        assert isinstance(entry.expr, Constant)
        slower = replace(entry.expr, values=tuple(value / 2 for value in entry.expr.values))
        exported.weights.define(kind, key, replace(entry, expr=slower))
    mine = replace(recompiled, exported=exported)
    prompt = mine.prompt(tokens=LENGTH)
    found = bisect_artifact(mine, prompt, None, None, None, tmp_path, lambda _: None)
    assert (found.cause, found.name) == (Cause.EXPORT, "rotary_emb.inv_freq")
    told = "constant rotary_emb.inv_freq is computed differently by the export"
    assert told in export_report(mine, prompt).problem


@pytest.mark.slow
@pytest.mark.parametrize("version", [None, "0.0.1"])
def test_files_that_are_not_what_the_passes_make(
    recompiled: RecompiledArtifact,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str | None,
) -> None:
    """To blame where this installation wrote them."""
    manifest = recompiled.artifact.manifest
    producer = replace(manifest.producer, version=version or manifest.producer.version)
    artifact = replace(recompiled.artifact, manifest=replace(manifest, producer=producer))
    mine = replace(recompiled, artifact=artifact)
    told = "graph dense is not what the passes make: 0.177 for 0.1767766952966369"
    monkeypatch.setattr(RecompiledArtifact, "problems", lambda self: [told])
    monkeypatch.setattr("dsa_compile.verify.bisect.bisect_artifact.other_checks",
                        lambda *args: [])  # fmt: skip
    prompt = mine.prompt(tokens=LENGTH)
    found = bisect_artifact(mine, prompt, None, None, None, tmp_path, lambda _: None)
    if version is None:
        assert (found.cause, found.problem) == (Cause.ARTIFACT, told)
    else:
        assert found.cause is Cause.NONE


def test_an_artifact_that_was_stopped_early_is_not_run(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "artifact"
    compile_model(model_dir, path, block_size=16, stop_after="recognize_rms_norm")
    mine = RecompiledArtifact.open(path)
    prompt = mine.prompt(tokens=LENGTH)
    found = bisect_artifact(mine, prompt, None, None, None, tmp_path, lambda _: None)
    assert found.cause is Cause.NONE
    assert [text.partition(":")[0] for text in found.untested] == ["kernels and runtime options"]


def test_a_pass_that_refuses_what_is_right_is_named(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "artifact"
    compile_model(model_dir, path, block_size=16, stop_after="recognize_rms_norm")
    replay = RecompiledArtifact.open(path).replay
    assert (replay.failure, replay.complete) == (None, True)
    behind = "recognize_layer_norm"
    monkeypatch.setattr(RecognizeLayerNorm, "expects", lambda *_: 7)
    mine = RecompiledArtifact.open(path)
    prompt = mine.prompt(tokens=LENGTH)
    found = bisect_artifact(mine, prompt, None, None, None, tmp_path, lambda _: None)
    assert (found.cause, found.name) == (Cause.PASS, behind)
    assert "of 7 sites" in found.problem
    assert mine.problems() == []
    report = verify(mine.replay, mine.store, prompt)
    assert [done.name for done in report.passes if done.problem] == [behind]


def test_a_pass_that_refuses_what_is_wrong_is_not_accused(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "artifact"
    compile_model(model_dir, path, block_size=16, stop_after="recognize_rms_norm")
    mine = RecompiledArtifact.open(path)
    mine.replay.failure = ("recognize_layer_norm", "matched none")
    monkeypatch.setattr(verify_compilation, "plan_problems", lambda _: ["layers share caches"])
    report = verify(mine.replay, mine.store, mine.prompt(tokens=LENGTH))
    assert [found.problem for found in report.hazards] == ["layers share caches"]
    assert not any(done.problem for done in report.passes)


def test_kernels_of_a_gpu_are_checked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = KernelReport("dsa.experts.default", "cuda", "moe.long", "experts", 3, 0.0, "ends it")
    monkeypatch.setattr(other_causes, "device_problem", lambda target: "")
    monkeypatch.setattr(other_causes, "check_kernels_apart", lambda *args: iter([crash]))
    artifact: Any = SimpleNamespace(
        dummy=True,
        small=False,
        replay=SimpleNamespace(final=None),
        artifact=SimpleNamespace(
            manifest=SimpleNamespace(target="sm_90a", compile=CompileConfig(layout=ONE_RANK))
        ),
    )
    found, _ = causes_of(artifact)
    assert found == (Cause.KERNEL, str(crash), "ends it")
    assert "dsa.experts.default by cuda" in str(crash)


@pytest.mark.parametrize("wrong", [None, ("prefix reuse", "token 1 is 420, not 205")])
def test_options_of_several_ranks_are_tested_on_one(
    wrong: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = object()
    artifact: Any = SimpleNamespace(
        dummy=True,
        replay=SimpleNamespace(final=SimpleNamespace(regions={})),
        on_one_rank=lambda: alone,
        small=True,
        artifact=SimpleNamespace(
            manifest=SimpleNamespace(target="cpu", compile=CompileConfig(layout=Layout(tp=2)))
        ),
    )
    tested = []
    monkeypatch.setattr(other_causes, "wrong_option", lambda of: tested.append(of) or wrong)
    loaded = (None, ("runtime as it is loaded",))
    monkeypatch.setattr(other_causes, "_as_loaded", lambda of: loaded)
    found, untested = causes_of(artifact)
    assert tested == [alone]
    assert ("runtime as it is loaded" in untested) == (wrong is None)
    assert found == (None if wrong is None else (Cause.OPTION, *wrong))
    assert "kernels but for collectives: the weights are cut over ranks (tp2)" in untested[1]
    assert "on several ranks: they were tested on the same model compiled for" in untested[-1]


def test_a_wrong_collective_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CompileConfig(layout=Layout(tp=2))
    artifact: Any = SimpleNamespace(
        dummy=True,
        small=False,
        replay=SimpleNamespace(final=None),
        artifact=SimpleNamespace(manifest=SimpleNamespace(target="cpu", compile=config)),
    )
    right = KernelReport("dsa.all_reduce.default", "reference", "moe", "all_reduce", "moe", 0.0)
    wrong = replace(right, op="dsa.all_gather.default", ratio=math.inf, problem="gives rank 0 …")
    monkeypatch.setattr(other_causes, "collective_reports", lambda program: [right, wrong])
    found, _ = causes_of(artifact)
    assert found == (Cause.KERNEL, str(wrong), "gives rank 0 …")


def test_nothing_is_said_of_an_artifact_whose_passes_do_not_run(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = recompiled.replay.runs[3].before  # as far as the passes came
    replay = SimpleNamespace(final=final, complete=True)
    broken = replace(recompiled, replay=replay)  # type: ignore[arg-type]
    assert broken.problems()
    replay.complete = False
    assert broken.problems() == []
