"""``dsa_compile.compile``: its signature, the target it chooses, and what notebooks show of it."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dsa_compile
from dsa_compile import CompileConfig, CompileResult
from dsa_compile.errors import UserError
from dsa_compile.facts import gpus
from dsa_compile.facts.gpus import Driver, Gpu
from dsa_compile.inspect.diff import pass_diff
from dsa_compile.inspect.fold import fold
from dsa_compile.inspect.store import Store
from examples.small_models.models import tiny_config

OWN = {"model", "out", "options", "force", "revision", "progress", "passes"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small model, in a folder whose name is a tag of HTML."""
    path = tmp_path_factory.mktemp("models") / "<b>"
    tiny_config(2, first_k_dense_replace=1).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def result(model_dir: Path) -> CompileResult:
    out = model_dir.parent / "<i>artifact"
    return dsa_compile.compile(model_dir, out, weights="none", layers=(0, 0))


def test_the_signature_is_that_of_the_options() -> None:
    parameters = inspect.signature(dsa_compile.compile).parameters
    given = {n: p.default for n, p in parameters.items() if n not in OWN}
    fields = {f.name: f.default for f in dataclasses.fields(CompileConfig)}
    del fields["added_passes"]  # made of ``passes`` and of what packages add
    assert given == fields
    described = inspect.getdoc(dsa_compile.compile) or ""
    assert [name for name in parameters if f"{name}: " not in described] == []
    described = inspect.getdoc(CompileConfig) or ""
    assert [name for name in fields if f"{name}: " not in described] == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recipee": "fp8"}, "compile() has no option 'recipee'; did you mean 'recipe'?"),
        ({"recipe": "pf8"}, "unknown recipe 'pf8'; did you mean 'fp8'?"),
        ({"disable": "absorb_mla"}, "should be a list, such as ['absorb_mla']"),
        ({"layers": (3,)}, "should be the first and the last to keep"),
        ({"options": CompileConfig(), "recipe": "bf16"}, "or single options, not both"),
    ],
)
def test_wrong_options(model_dir: Path, tmp_path: Path, options: dict, says: str) -> None:
    with pytest.raises(UserError) as error:
        dsa_compile.compile(model_dir, tmp_path / "a", **options)
    assert says in str(error.value)


def test_options_as_one_object(model_dir: Path, tmp_path: Path, result: CompileResult) -> None:
    options = CompileConfig(weights="none", layers=[0, 0])
    same = dsa_compile.compile(model_dir, tmp_path / "a", options=options)
    assert same.manifest.compile == result.manifest.compile


def test_importing_the_package_imports_nothing_of_the_compiler() -> None:
    code = (
        "import sys, dsa_compile; dsa_compile.CompileConfig; dsa_compile.compile\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


H200, B200 = Gpu("NVIDIA H200", (9, 0)), Gpu("NVIDIA B200", (10, 0))
A100 = Gpu("NVIDIA A100", (8, 0))


@pytest.mark.parametrize(
    ("found", "target", "why"),
    [
        ((), "cpu", "no CUDA GPU is visible here"),
        ((H200,), "sm_90a", "the GPU here is NVIDIA H200 (compute capability 9.0)"),
        ((B200, H200), "sm_100a", "the GPU here is NVIDIA B200 (compute capability 10.0)"),
    ],
)
def test_the_target_is_that_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Gpu, ...], target: str, why: str
) -> None:
    monkeypatch.setattr(gpus, "find_driver", lambda: Driver("13.0", found))
    assert gpus.choose_target() == (target, why)
    assert CompileConfig().target == target
    assert CompileConfig(target="cpu").target == "cpu"


def test_a_gpu_that_no_target_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_driver", lambda: Driver("13.0", (A100,)))
    says = r"NVIDIA A100 \(compute capability 8.0\); give --target cpu, or one of .*sm_90a 9.0"
    with pytest.raises(UserError, match=says):
        CompileConfig()
    assert CompileConfig(target="sm_90a").target == "sm_90a"


def test_what_is_shown_of_results(result: CompileResult) -> None:
    digest = result.manifest.digest[:12]
    assert repr(result).startswith(f"<CompileResult {result.path}: cpu, fp32, 1 layers, {digest}, ")
    assert repr(result.program).startswith("<Program KERNEL: layers 1 dense; regions embed.long, ")
    record = next(r for r in result.program.records if r.name == "recognize_swiglu")
    assert repr(record).startswith("<PassRecord recognize_swiglu: 1 of 1 rewrites, ")
    store = Store.open(result.path)
    stage = store.stage("recognize_swiglu")
    diffs = pass_diff(stage)
    (folded,) = fold(store, diffs)
    for shown in (result, result.program, record, diffs[0], folded):
        html = shown._repr_html_()
        assert len(repr(shown)) < 400
        assert len(html) < 60_000
        assert "<i>artifact" not in html
    for shown in (record, diffs[0], folded):
        assert "swiglu = ops.dsa.swiglu(" in shown._repr_html_()


def test_html_is_escaped_and_bounded() -> None:
    from dsa_compile.common.notebook import diff_html, table_html

    html = diff_html("<x>", "", "\n".join(["<script>alert(1)</script>"] * 5000))
    assert "<script>" not in html
    assert "<x>" not in html
    assert "and 4801 more" in html
    html = table_html("t", ("<h>",), [("<td>" * 500,)] * 900)
    assert "<h>" not in html
    assert "<td><td>" not in html
    assert len(html) < 300_000
