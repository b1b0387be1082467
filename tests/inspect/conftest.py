"""Artifacts that several tests of this area look at, and a report of one in a browser."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.cli.inspect.command import main
from dsa_compile.inspect.store import Store
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.step.ablation import Ablated
from dsa_compile.measure.step.run import Row
from dsa_compile.measure.step.timeline import Share
from dsa_compile.verify.checks.report import PassReport, SiteReport, VerifyReport
from examples.small_models.models import save_hf, tiny_config, tiny_model
from tests.inspect.report_page import Report

PUBLISHED: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_nextn_predict_layers": 1,
}
"""The geometry of DeepSeek-V3.2: transformers' defaults."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model`` (one dense layer, one of experts) and its fp32 ``artifact``."""
    folder = tmp_path_factory.mktemp("tiny")
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1)), folder / "model")
    compile_model(folder / "model", folder / "artifact", recipe="fp32")
    return folder


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of all 61 layers for a GPU, in FP8, with streams; without weights."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(PUBLISHED))
    path = folder / "artifact"
    options = {"weights": "none", "compiled_kernels": False}
    compile_model(folder / "model", path, recipe="fp8", target="sm_90a", **options)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One browser for the tests of a file; they are skipped where there is none."""
    pytest.importorskip("playwright.sync_api")
    from tests.chromium import NoBrowserError, chromium

    try:
        with chromium() as found:
            yield found
    except NoBrowserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def store(published: Path) -> Store:
    """The records of the published geometry."""
    return Store.open(published)


@pytest.fixture(scope="module")
def report(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Report of all 61 layers, with the errors of a verification and the times of a layer."""
    folder = tmp_path_factory.mktemp("report")
    error = SiteReport(
        1, "absorb_mla", 2, "moe", "self_attn", 7, "captured", False, 3e-4, 1.0,
        None, None, None, 1e-2, 2e-4, 1.5, 1e-12, ("a", "b"),
    )  # fmt: skip
    boundless = replace(error, pass_name="merge_shared_expert", number=1, error=math.inf)
    passes = [
        PassReport("absorb_mla", "tolerance", 2, error=3e-4),
        PassReport("merge_shared_expert", "tolerance", 1, error=math.inf),
        PassReport("quantize_experts", "tolerance", 1, error=0.5, problem="beyond its tolerance"),
    ]
    verified = VerifyReport(40, (40,), 16, passes, [error, boundless]).write(folder)
    out = folder / "report.html"
    us = {"experts_fp8 mlp": 80.0, "router mlp.gate": 5.0, "paged_index_topk_fp8 self_attn": 9.0}
    ops = {label: Share(time, 1.0, []) for label, time in us.items()}
    row = Row("decode 32", step=12.0, layer=0.2, host=0.1, wall=12.5, ops=ops, kind="moe")
    without = Ablated("fuse_add_norm", {"decode 32": 0.21})
    bench = folder / "bench.json"
    bench.write_text(json.dumps({"rows": [asdict(row)], "ablation": [asdict(without)]}))
    command = [str(published), "html", "-o", str(out), "--verify", str(verified)]
    assert main([*command, "--bench", str(bench)]) == 0
    return out


@pytest.fixture
def shown(browser: Any, report: Path) -> Iterator[Report]:
    """A new page; whatever the test does, the page must not complain."""
    page = browser.new_page(viewport={"width": 1600, "height": 900}, color_scheme="dark")
    page.set_default_timeout(30_000)
    made = Report(page, report)
    yield made
    page.close()
    assert not made.faults
