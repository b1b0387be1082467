"""Cases, floors and arguments of ``dsa-bench step``; no GPU."""

import json
from pathlib import Path

import pytest
import torch

from dsa_compile.cli.bench import main
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import load_spec
from dsa_compile.ir.plan import VARIANTS
from dsa_compile.ir.region import Role
from dsa_compile.measure.step import report
from dsa_compile.measure.step.cases import Decode, Mixed, Prefill
from dsa_compile.measure.step.floor import decode_bytes
from dsa_compile.measure.step.mixed import company, mixed_cases
from dsa_compile.measure.step.model import Compiled, Compiler
from dsa_compile.measure.step.published import VLLM, of_this_layer
from dsa_compile.measure.step.released import write_released
from dsa_compile.measure.step.run import Row, blocks_for
from dsa_compile.measure.step.timeline import Share
from examples.small_models.models import tiny_config

EXPERTS, TOPK = 16, 16


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("model")
    tiny_config(5, n_shared_experts=1).save_pretrained(folder)
    return Compiler(folder, CompileConfig(recipe="bf16", weights="none", block_size=16)).compile()


def test_a_decode_step_has_pages_of_its_own() -> None:
    case = Decode(3, 100)
    (batch,) = case.steps(16, 512)
    assert (batch.num_tokens, batch.num_requests) == (3, 3)
    assert batch.block_tables.shape == (3, 7)
    assert sorted(batch.block_tables.ravel()) == list(range(case.blocks(16)))
    assert (batch.slot_mapping == batch.block_tables[:, 6] * 16 + 3).all()
    assert batch.input_ids.max() < 512


def test_a_prefill_comes_in_chunks() -> None:
    first, second = Prefill(100, chunk=64).steps(16, 512)
    assert [batch.num_tokens for batch in (first, second)] == [64, 36]
    assert [batch.context_lens.tolist() for batch in (first, second)] == [[64], [100]]
    assert (len(first.logit_rows), second.logit_rows.tolist()) == (0, [35])
    slots = [*first.slot_mapping, *second.slot_mapping]
    assert len(set(slots)) == 100
    assert second.block_tables.shape == (1, 7)


def test_a_mixed_step_decodes_and_ends_a_prompt() -> None:
    case = Mixed(2, 100, 37)
    (batch,) = case.steps(16, 512)
    assert (batch.num_tokens, batch.num_requests, batch.tokens_each) == (39, 3, None)
    assert batch.cu_seqlens.tolist() == [0, 1, 2, 39]
    assert batch.positions.tolist() == [99, 99, *range(63, 100)]
    assert batch.logit_rows.tolist() == [0, 1, 38]
    assert len(set(batch.slot_mapping.tolist())) == 39
    assert sorted(batch.block_tables.ravel()) == list(range(case.blocks(16)))
    (alone,) = Mixed(0, 100, 37).steps(16, 512)
    assert (alone.num_tokens, alone.num_requests) == (37, 1)


def test_company_is_compared_with_its_parts_of_the_same_run() -> None:
    mixed = mixed_cases([1, 64], [1024, 8192], [2048])
    assert {(case.batch, case.context) for case in mixed} == {(0, 8192), (64, 8192)}
    cases = [Decode(64, 8192), *mixed]
    rows = [Row(case.label(), 10.0 + i, 0.1, 0.1, 2.0) for i, case in enumerate(cases)]
    assert len({row.case for row in rows}) == 5
    captured, eager = company(cases, rows)
    assert (captured.together, captured.apart) == (13.0, 10.0 + 11.0)
    assert (eager.together, eager.apart) == (14.0, 10.0 + 12.0)
    assert eager.case.endswith("no graph")
    assert company(cases[1:], rows[1:]) == []


@pytest.mark.parametrize("context", [TOPK, TOPK + 1, 100])
def test_the_floor_counts_what_a_layer_must_read(compiled: Compiled, context: int) -> None:
    short = context <= TOPK
    region = compiled.regions["moe.short" if short else "moe.long"]
    weights = {n.meta["key"]: n.meta["val"] for n in region.inputs_of(Role.WEIGHT)}
    sizes = {k: v.dtype.itemsize * torch.Size(v.shape).numel() for k, v in weights.items()}
    routed = {k: v for k, v in sizes.items() if k.startswith("mlp.experts.")}
    stacked = weights[next(iter(routed))].shape[0]
    assert stacked in (EXPERTS, EXPERTS + 1)
    rows = 2 * (min(context, TOPK) * 48 * 2 + (0 if short else context * 32 * 2))
    want = sum(sizes.values()) - sum(routed.values()) * (1 - 5 / stacked) + rows
    assert decode_bytes(compiled, "moe", Decode(2, context), 5) == pytest.approx(want)


def test_the_largest_case_that_fits(compiled: Compiled) -> None:
    cases = [Decode(1, 160), Decode(4, 160), Decode(64, 160)]
    page = 16 * (48 + 32) * 2 * 5
    assert blocks_for(cases, compiled, reserve=0.0, free=100 * page) == 40
    assert blocks_for(cases, compiled, reserve=0.5, free=100 * page) == 40
    assert blocks_for(cases, compiled, reserve=0.0, free=9 * page) == 0


@pytest.mark.slow
def test_a_compilation_without_a_pass(compiled: Compiled, tmp_path: Path) -> None:
    tiny_config(3).save_pretrained(tmp_path)
    compiler = Compiler(tmp_path, CompileConfig(recipe="bf16", weights="none"))
    with_, without = compiler.compile(), compiler.compile(("split_short_long",))
    assert with_.manifest.variants == VARIANTS
    assert without.manifest.variants == ()
    assert set(without.regions) == {"embed", "dense", "moe", "head"}


def test_the_released_configuration(tmp_path: Path) -> None:
    spec = load_spec(write_released(tmp_path))
    assert (spec.num_hidden_layers, spec.n_routed_experts, spec.index_topk) == (61, 256, 2048)
    assert spec.layer_kinds.count("dense") == 3
    assert spec.quantization is not None
    assert spec.quantization.scale_fmt == "ue8m0"


def test_figures_of_another_run_are_dated_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "some GPU", "torch": "2"})
    case = Decode(16, 8192)
    page = report.to_markdown([case], [Row(case.label(), 5.5, 1.0, 0.1, 6.0)], "moe", True)
    head, _, row = [line for line in page.splitlines() if line.startswith("|")]
    assert VLLM in head
    assert "202" in VLLM, "without its date"
    assert "÷" not in head
    assert "1.199" in row, "the figure itself"


def test_figures_of_another_model_or_gpu_do_not_stand_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "some GPU", "torch": "2"})
    released = load_spec(write_released(tmp_path))
    glm = load_spec(Path(__file__).parents[2] / "examples" / "configs" / "glm_5")
    assert of_this_layer(released, "moe", "fp8", "NVIDIA H200")
    assert not of_this_layer(released, "moe", "fp8", "NVIDIA H100 80GB HBM3")
    assert not of_this_layer(glm, "moe", "fp8", "NVIDIA H200")
    assert not of_this_layer(released, "dense", "fp8", "NVIDIA H200")
    assert not of_this_layer(released, "moe", "bf16", "NVIDIA H200")
    case = Decode(16, 8192)
    page = report.to_markdown([case], [Row(case.label(), 5.5, 1.0, 0.1, 6.0)], "moe", False)
    assert VLLM not in page
    assert "goal" not in page
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in lines} == {11}


def test_a_row_is_json() -> None:
    from dataclasses import asdict

    row = Row("decode 1 × 8K", 1.5, 0.2, 0.1, 1.6, ops={"router": Share(7.0, 2, ["k"])})
    assert json.loads(json.dumps(asdict(row)))["ops"]["router"]["us"] == 7.0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--batch", "", "--prefill", ""], "nothing to time"),
        (["--batch", "0"], "nothing to time"),
        (["--mixed", "0"], "nothing to time"),
        (["--context", "8M"], "'8M' is not a list of numbers"),
        (["--layers", "3"], "--layers 3: give several"),
    ],
)
def test_arguments_that_make_no_sense(
    argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["dsa-bench", "step", *argv])
    assert main() == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["dsa-bench", "step"])
    assert main() == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
