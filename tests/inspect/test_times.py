"""Time by pass and rewrite, from made profiles."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.records import KernelRecord
from dsa_compile.errors import UserError
from dsa_compile.inspect import times
from dsa_compile.inspect.listing import pass_rows
from dsa_compile.inspect.measured import (
    bench_cases,
    choose_case,
    profile_calls,
    verify_report,
)
from dsa_compile.inspect.store import Store
from dsa_compile.inspect.times import attribute_case, attribute_profile
from dsa_compile.ir.graph import Node
from dsa_compile.ir.storage import Memory
from dsa_compile.ir.stream_profile import Profile, call_key
from dsa_compile.measure.step.ablation import Ablated
from dsa_compile.measure.step.by_op import Ranges
from dsa_compile.measure.step.run import Row
from dsa_compile.measure.step.timeline import Share

LABEL = "decode 1 × 8K"


@pytest.fixture(scope="module")
def artifact(published: Path) -> Artifact:
    return Artifact.open(published)


def labels_of(artifact: Artifact, region: str) -> list[str]:
    """Labels of the ops of a region in ``dsa-bench step``."""
    ranges = Ranges()
    kernels = {op: (KernelRecord("reference"),) for op in artifact.manifest.kernels}
    ranges.within({region: artifact.region(region)}, kernels, "cpu")
    return sorted(name.partition(": ")[2] for name in ranges.names)


@pytest.fixture(scope="module")
def labels(artifact: Artifact) -> list[str]:
    return labels_of(artifact, "moe.long")


def write(path: Path, ops: dict[str, float], ablation: list[Ablated], kind: str = "moe") -> Path:
    shares = {op: Share(us, 1.0, ["kernel"]) for op, us in ops.items()}
    layer = sum(ops.values()) / 1e3 + 0.002
    row = Row(LABEL, 1.0, layer, 0.1, 1.1, ops=shares, kind=kind)
    # as bench.step.report.to_json, which needs a GPU to name the machine
    data = {"machine": {}, "rows": [asdict(row)], "ablation": [asdict(each) for each in ablation]}
    path.write_text(json.dumps(data))
    return path


def test_each_call_gets_the_time_of_its_op(
    published: Path, labels: list[str], tmp_path: Path
) -> None:
    store = Store.open(published)
    ops = {label: float(10 + index) for index, label in enumerate(labels)}
    (case,) = bench_cases(write(tmp_path / "bench.json", ops, []))
    found = attribute_case(store, case)
    assert found.regions == ("moe.long",)
    assert not found.unmatched
    assert sum(call.us for call in found.calls) == pytest.approx(sum(ops.values()))
    by_node = {call.node: call for call in found.calls}
    experts = by_node["experts_fp8"]
    assert (experts.us, experts.shared) == (ops["experts_fp8 mlp"], 1)
    assert experts.step is not None
    assert (experts.step.name, experts.step.sites) == ("quantize_experts", (1,))
    norms = {call.path: call for call in found.calls if call.op == "add_rms_norm_quantize"}
    assert {path: (call.us, call.pass_name) for path, call in norms.items()} == {
        path: (ops[f"add_rms_norm_quantize {path}"], name)
        for path, name in (
            ("post_attention_layernorm", "fuse_add_norm_quantize"),
            ("next_norm", "fuse_norm_quantize_across_layers"),
        )
    }


def test_a_step_of_short_contexts_is_of_the_short_variant(
    published: Path, artifact: Artifact, labels: list[str], tmp_path: Path
) -> None:
    """Whose calls are in the long one too, but for those that make slots."""
    short = labels_of(artifact, "moe.short")
    common = [label for label in short if label in labels]
    assert len(common) < len(labels)
    for timed in (short, common):
        (case,) = bench_cases(write(tmp_path / "bench.json", dict.fromkeys(timed, 3.0), []))
        assert attribute_case(Store.open(published), case).regions == ("moe.short",)


def test_calls_of_one_label_share_its_time(
    published: Path, labels: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def label(node: Node) -> str:
        return "norm" if "norm" in node.target else named(node)

    named = times._label
    monkeypatch.setattr(times, "_label", label)
    (case,) = bench_cases(write(tmp_path / "bench.json", {"norm": 5.0}, []))
    found = attribute_case(Store.open(published), case)
    assert [(call.shared, call.us) for call in found.calls] == [(2, 2.5)] * 2


def test_sites_and_passes_add_up(published: Path, labels: list[str], tmp_path: Path) -> None:
    (case,) = bench_cases(write(tmp_path / "bench.json", dict.fromkeys(labels, 3.0), []))
    found = attribute_case(Store.open(published), case)
    total = sum(call.us for call in found.calls)
    for rows in (found.by_site(), found.by_pass()):
        assert sum(row.us for row in rows) == pytest.approx(total)
        assert [row.us for row in rows] == sorted((row.us for row in rows), reverse=True)
    projections = [row for row in found.by_site() if row.pass_name == "quantize_projections"]
    assert len(projections) == 4
    assert {row.ops for row in projections} == {("linear_fp8",)}
    (row,) = (row for row in found.by_pass() if row.pass_name == "quantize_projections")
    assert (row.us, row.calls, row.launches) == (12.0, 4, 4.0)


def test_what_a_pass_saved(published: Path, labels: list[str], tmp_path: Path) -> None:
    ops = dict.fromkeys(labels, 3.0)
    layer = sum(ops.values()) / 1e3 + 0.002
    ablation = [
        Ablated("overlap_streams", {LABEL: layer + 0.004}),
        Ablated("absorb_mla", problem="fuse_rope_absorb needs it"),
    ]
    (case,) = bench_cases(write(tmp_path / "bench.json", ops, ablation))
    assert case.layer_us == pytest.approx(1e3 * layer)
    assert case.saved_us == {"overlap_streams": pytest.approx(4.0)}
    assert case.failed == {"absorb_mla": "fuse_rope_absorb needs it"}
    rows = {row["name"]: row for row in pass_rows(Store.open(published), case=case)}
    assert rows["overlap_streams"]["saved_us"] == pytest.approx(4.0)
    assert rows["absorb_mla"]["saved_us"] is None


def test_times_of_another_program_are_refused(published: Path, tmp_path: Path) -> None:
    store = Store.open(published)
    (case,) = bench_cases(write(tmp_path / "a.json", {"conv2d features": 1.0}, []))
    with pytest.raises(UserError, match=r"no op timed is in .*; was it compiled alike"):
        attribute_case(store, case)
    (case,) = bench_cases(write(tmp_path / "b.json", {"experts_fp8 mlp": 1.0}, [], kind="sparse"))
    with pytest.raises(UserError, match=r"times of sparse layers, and .* has none"):
        attribute_case(store, case)
    (case,) = bench_cases(write(tmp_path / "c.json", {}, []))
    with pytest.raises(UserError, match=r"no times by op; .*--by-op"):
        attribute_case(store, case)


def test_older_files_do_not_tell_the_kind(
    published: Path, labels: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path / "bench.json", dict.fromkeys(labels, 1.0), [])
    data = json.loads(path.read_text())
    del data["rows"][0]["kind"]
    path.write_text(json.dumps(data))
    (case,) = bench_cases(path)
    assert attribute_case(Store.open(published), case).regions == ("moe.long",)


def profile(artifact: Artifact, context: int) -> Profile:
    calls = {
        call_key(node): 2.5
        for name in ("embed.long", "dense.long", "moe.long", "head")
        for node in Memory(artifact.region(name).graph).uses
    }
    return Profile("made", "sm_90a", 1, context, calls)


def test_times_of_single_calls_cover_a_step(
    published: Path, artifact: Artifact, tmp_path: Path
) -> None:
    made = profile(artifact, 8192)
    made.save(tmp_path / "profile.json")
    store = Store.open(published)
    found = attribute_profile(store, *profile_calls(tmp_path / "profile.json"))
    assert set(found.regions) == {"embed.long", "dense.long", "moe.long", "head"}
    assert not found.unmatched
    assert all(call.us == 2.5 for call in found.calls)
    timed = {(call.region, call.node) for call in found.calls}
    for name in found.regions:
        for node in Memory(artifact.region(name).graph).uses:
            assert (name, node.name) in timed
    times = {region: store.times(region) for region in found.regions}
    (experts,) = (row for row in found.by_pass(times) if row.pass_name == "quantize_experts")
    assert experts.us == pytest.approx(2.5 * 58)


def test_a_short_context_ran_the_short_variant(published: Path, artifact: Artifact) -> None:
    made = profile(artifact, 100)
    found = attribute_profile(Store.open(published), made.context, made.calls)
    assert set(found.regions) == {"embed.short", "dense.short", "moe.short", "head"}
    assert any("paged_index_topk" in label for label in found.unmatched)


def test_files_that_are_no_measurements(tmp_path: Path) -> None:
    readers = (bench_cases, profile_calls, verify_report)
    for reader in readers:
        with pytest.raises(UserError, match="cannot be read"):
            reader(tmp_path / "absent.json")
        for text, says in (("{", "not JSON"), ("[]", "not "), ('{"rows": [1]}', "not ")):
            path = tmp_path / "bad.json"
            path.write_text(text)
            with pytest.raises(UserError, match=says):
                reader(path)
    path = write(tmp_path / "bench.json", {"experts_fp8 mlp": 1.0}, [])
    with pytest.raises(UserError, match="unknown case 'decode 2 × 8K'; did you mean 'decode 1"):
        choose_case(bench_cases(path), "decode 2 × 8K", path)


def test_errors_by_pass(published: Path, tmp_path: Path) -> None:
    passes = [
        {"name": "absorb_mla", "error": 1e-3, "problem": ""},
        {"name": "quantize_experts", "error": None, "problem": "not finite"},
    ]
    path = tmp_path / "verify.json"
    path.write_text(json.dumps({"format": 1, "passes": passes, "sites": []}))
    rows = {row["name"]: row for row in pass_rows(Store.open(published), verify_report(path))}
    assert (rows["absorb_mla"]["error"], rows["absorb_mla"]["problem"]) == (1e-3, "")
    assert rows["quantize_experts"]["problem"] == "not finite"
    assert rows["pack_swiglu"]["error"] is None


def test_the_worst_layer_of_a_rewrite(tmp_path: Path) -> None:
    def site(layer: int, error: float | None, problem: str = "") -> dict[str, object]:
        return {"pass_name": "p", "number": 1, "layer": layer, "error": error, "problem": problem}

    path = tmp_path / "verify.json"
    for sites, worst in (
        ([site(0, 1e-6), site(1, 1e-3), site(2, 0.0)], site(1, 1e-3)),
        ([site(0, 1e-3), site(1, None)], site(1, None)),
        ([site(0, 1e-3), site(1, 1e-6, "bits differ")], site(1, 1e-6, "bits differ")),
    ):
        path.write_text(json.dumps({"passes": [], "sites": sites}))
        assert verify_report(path).sites == {("p", 1): worst}
    path.write_text('{"passes": [], "sites": [1]}')
    with pytest.raises(UserError, match="not the report of verify"):
        verify_report(path)
