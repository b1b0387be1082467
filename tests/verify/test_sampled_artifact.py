"""Models too wide for exact arithmetic are verified on a sample of their experts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsa_compile.cli.inspect.command import main
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.frontend.build import load_spec
from dsa_compile.passes.recognize_experts import RecognizeExperts
from dsa_compile.verify.checks.report import VerifyReport
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution import forked
from dsa_compile.verify.inputs import sample
from dsa_compile.verify.inputs.sample import is_wide, sample_of
from dsa_compile.verify.inputs.sampled_parameters import SampledParameters
from dsa_compile.verify.recompiled_artifact import ExportedArtifact, RecompiledArtifact
from dsa_compile.verify.sampled_artifact import SampledArtifact, sampled_artifact
from tests.planted_bugs.faults import fault_named
from tests.planted_bugs.planting import planted
from tests.quick_cases import quick_first
from tests.trained import trained_model

RELEASED = Path(__file__).parents[2] / "examples" / "deepseek_v32"
EXPERTS = 8  # of the 16 of the small model


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model counts as too wide."""
    monkeypatch.setattr(sample, "WIDE_BYTES", 0)
    monkeypatch.setattr(sample, "_TOKENS", 100)


@pytest.fixture(scope="session")
def small(recompiled: RecompiledArtifact) -> SampledArtifact:
    return sampled_artifact(recompiled, EXPERTS)


def checked(small: SampledArtifact, *only: str) -> VerifyReport:
    part = small.small
    return verify(part.replay, part.store, part.prompt(), only or None)


def test_the_released_layer_is_wide_and_the_examples_are_not() -> None:
    spec = load_spec(RELEASED)
    assert is_wide(spec, [3])
    assert is_wide(spec, [0])  # not for its experts: it has none
    assert not is_wide(load_spec(trained_model()), [0, 1, 2])


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
def test_the_verdict_says_what_was_sampled(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main([str(artifact), "verify", "--experts", str(EXPERTS), "--prompt-ids",
                   " ".join(map(str, range(300, 330)))])  # fmt: skip
    out = capsys.readouterr().out
    assert status == 0, out
    assert out.startswith("all right in a sample: ")
    assert "sample:     8 of 16 experts a layer, 2 of them a token in place of 4;" in out
    assert "bisect" not in out  # which takes whole models alone
    report = json.loads((artifact / "verify.json").read_text())
    assert report["ok"] is True
    assert "130 of 512 tokens" in report["sampled"]  # those of the prompt are among them
    assert {site["layer"] for site in report["sites"]} >= {0, 1}
    assert len(report["contexts"]) == 6


@pytest.mark.slow
@pytest.mark.usefixtures("wide")
def test_what_is_exported_again_is_the_whole_model(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a process beside the check, whose model has fewer layers and experts."""
    monkeypatch.setattr(forked, "usable_processes", lambda: 2)
    exported: list[int] = []
    whole = ExportedArtifact.problems

    def problems(self: ExportedArtifact) -> list[str]:
        exported.append(self.exported.spec.n_routed_experts)
        return whole(self)

    class Here:
        def __init__(self, function: Callable[[], list[str]]) -> None:
            self.result = function

        def __enter__(self) -> "Here":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(ExportedArtifact, "problems", problems)
    monkeypatch.setattr(forked, "Forked", Here)
    args = [str(artifact), "verify", "--experts", str(EXPERTS), "--pass", "recognize_experts"]
    assert main(args) == 0, capsys.readouterr().out
    assert exported == [16]


def test_whole_models_that_fit_are_not_sampled(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (artifact / "verify.json").unlink(missing_ok=True)  # one of all passes would stay
    args = [str(artifact), "verify", "--tokens", "27", "--pass", "recognize_experts"]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert out.startswith("all right: ")
    assert json.loads((artifact / "verify.json").read_text())["sampled"] == ""


@pytest.mark.parametrize(
    ("count", "groups", "kept", "chosen"),
    [(8, 4, 2, 2), (16, 8, 4, 4), (64, 8, 4, 8), (2, 1, 1, 1)],
)
def test_a_choice_is_left_to_the_router(count: int, groups: int, kept: int, chosen: int) -> None:
    found = sample_of(load_spec(RELEASED), CompileConfig(layers=(3, 3)), count)
    wanted = {"n_group": groups, "topk_group": kept, "num_experts_per_tok": chosen}
    assert {name: found.sizes.get(name, getattr(found.whole, name)) for name in wanted} == wanted
    assert found.experts[:2] == (0, 256 // count)


def test_a_field_that_is_absent_stays_absent() -> None:
    """A router without groups makes other calls than one with a single group."""
    spec = load_spec(RELEASED.with_name("configs") / "a_x_k2_light")
    assert spec.n_group == 1
    found = sample_of(spec, CompileConfig())
    assert "n_group" not in found.sizes
    assert found.sizes["n_routed_experts"] == 8


def test_one_layer_of_each_kind_is_kept() -> None:
    spec = load_spec(RELEASED)
    assert sample_of(spec, CompileConfig()).layers == (2, 3)
    assert sample_of(spec, CompileConfig(layers=(5, 9))).layers == (5, 5)
    told = str(sample_of(spec, CompileConfig()))
    assert told.startswith("8 of 256 experts a layer, 2 of them a token in place of 8; 4 groups")
    assert "16 of 128 heads; 32 of 64 index heads" in told
    assert "layers 2-3 of 0-60" in told


@pytest.mark.parametrize(("ranks", "heads"), [(1, 16), (4, 16), (16, 32), (64, None)])
def test_every_rank_has_whole_blocks_of_heads(ranks: int, heads: int | None) -> None:
    """Two heads have 384 rows of queries, three blocks; all are kept where no fewer do."""
    layout = Layout(tp=ranks)
    found = sample_of(load_spec(RELEASED), CompileConfig(layers=(3, 3), layout=layout))
    assert found.sizes.get("num_attention_heads") == heads


@pytest.mark.parametrize("count", [0, 1, 17])
def test_numbers_of_experts_that_cannot_be_kept(recompiled: RecompiledArtifact, count: int) -> None:
    with pytest.raises(UserError, match="--experts: give a number from 2 to 16"):
        sampled_artifact(recompiled, count)


def test_its_weights_are_those_of_the_experts(
    recompiled: RecompiledArtifact, small: SampledArtifact
) -> None:
    whole, part = recompiled.store.source, small.small.store.source
    assert isinstance(part, SampledParameters)
    chosen = list(small.sample.experts)
    for name in ("mlp.experts.gate_up_proj", "mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
        full = f"model.layers.1.{name}"
        theirs, ours = (torch.empty(source.shape(full)) for source in (whole, part))
        whole.read_into(full, theirs)
        part.read_into(full, ours)
        assert torch.equal(ours, theirs[chosen])
    full = "model.layers.1.mlp.experts.down_proj"
    theirs, ours = (torch.empty(source.shape(full)) for source in (whole, part))
    scales = torch.empty(EXPERTS, 1, 1)
    values = torch.empty(ours.shape, dtype=torch.float8_e4m3fn)
    whole.read_into(full, theirs)
    part.read_quantized(full, 1, values, scales)
    assert torch.allclose(values.float() * scales, theirs[chosen], rtol=0.07, atol=1e-3)
    rows = (slice(1, 3), slice(0, 8), slice(4, 6))
    ours = torch.empty(2, 8, 2)
    part.read_into(full, ours, rows)
    assert torch.equal(ours, theirs[chosen][rows])


def test_its_heads_are_the_first_ones(recompiled: RecompiledArtifact) -> None:
    whole = recompiled.exported.spec
    heads = whole.num_attention_heads // 2
    spec = replace(whole, num_attention_heads=heads, index_n_heads=whole.index_n_heads // 2)
    source = recompiled.store.source
    part = SampledParameters(
        source, whole, spec, [1], range(whole.n_routed_experts), range(whole.vocab_size)
    )
    for name in ("q_b_proj", "kv_b_proj", "o_proj", "indexer.wq_b", "indexer.weights_proj"):
        full = f"model.layers.1.self_attn.{name}.weight"
        theirs, ours = torch.empty(source.shape(full)), torch.empty(part.shape(full))
        assert ours.numel() * 2 == theirs.numel()
        source.read_into(full, theirs)
        part.read_into(full, ours)
        first = theirs[: ours.shape[0], : ours.shape[1]]
        assert torch.equal(ours, first)
        window = (slice(2, 7), slice(1, 4))
        some = torch.empty(5, 3)
        part.read_into(full, some, window)
        assert torch.equal(some, first[window])
        rows, columns = (-(-size // 128) for size in ours.shape)
        values = torch.empty(ours.shape, dtype=torch.float8_e4m3fn)
        scales = torch.empty(rows, columns)
        part.read_quantized(full, 1, values, scales)
        wide = scales.repeat_interleave(128, 0)[: len(ours)]
        wide = wide.repeat_interleave(128, 1)[:, : ours.shape[1]]
        assert torch.allclose(values.float() * wide, first, rtol=0.07, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", quick_first(["gate-and-up-of-experts-exchanged", "rope-in-the-other-layout"])
)
def test_a_planted_fault_is_named(name: str, artifact: Path) -> None:
    fault = fault_named(name)
    with planted(fault.plant):
        found = checked(sampled_artifact(RecompiledArtifact.open(artifact), EXPERTS))
    assert {site.pass_name for site in found.wrong} == {fault.culprit}


@pytest.mark.slow
def test_a_sample_that_is_rewritten_otherwise_is_refused(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite, expects = RecognizeExperts.rewrite, RecognizeExperts.expects

    def of_many(self, edit, program, *rest):  # type: ignore[no-untyped-def]
        if program.spec.n_routed_experts > EXPERTS:
            rewrite(self, edit, program, *rest)

    def expected(self, program, *rest):  # type: ignore[no-untyped-def]
        many = program.spec.n_routed_experts > EXPERTS
        return expects(self, program, *rest) if many else None

    monkeypatch.setattr(RecognizeExperts, "rewrite", of_many)
    monkeypatch.setattr(RecognizeExperts, "expects", expected)
    with pytest.raises(UserError, match="recognize_experts makes other rewrites in it; give"):
        sampled_artifact(recompiled, EXPERTS)
