"""The HTML report without a browser: its data, its size, its safety, and what it refuses."""

import errno
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.artifact.records import ABOUT
from dsa_compile.cli.inspect.command import main
from dsa_compile.inspect.diff import pass_diff
from dsa_compile.inspect.html.document import document
from dsa_compile.inspect.html.overlays import numerics, times
from dsa_compile.inspect.html.payload import payload
from dsa_compile.inspect.store import Store
from dsa_compile.ir.listing import Listing
from dsa_compile.measure.step.ablation import Ablated
from dsa_compile.measure.step.run import Row
from dsa_compile.measure.step.timeline import Share
from dsa_compile.verify.checks.kernel_check import KernelReport
from dsa_compile.verify.checks.report import PassReport, SiteReport, VerifyReport
from tests.artifact.building import edit_manifest, forge

LIMIT = 15e6


@pytest.fixture(scope="module")
def data(published: Path) -> dict[str, Any]:
    """The report's data for all 61 layers."""
    return payload(Store.open(published))


def test_every_stage_can_be_rebuilt(published: Path, data: dict[str, Any]) -> None:
    for stage, told in zip(Store.open(published).stages, data["stages"], strict=True):
        assert told["name"] == stage.name
        assert told["graphs"].keys() == stage.graphs.keys()
        for name, graph in stage.graphs.items():
            lines = [data["lines"][i] for i in data["graphs"][told["graphs"][name]]]
            calls = list(Listing(graph).statements())
            inputs = len(graph.inputs)
            assert [line["n"] for line in lines[inputs:-1]] == [call.nodes for call in calls]
            assert [line["c"] for line in lines[inputs:-1]] == [call.code for call in calls]
            assert [line["n"][0] for line in lines[:inputs]] == [node.name for node in graph.inputs]
            assert lines[-1]["k"] == "return"


def test_rewrites_are_those_of_the_diff(published: Path, data: dict[str, Any]) -> None:
    for stage, told in zip(Store.open(published).stages[1:], data["stages"][1:], strict=True):
        for diff in pass_diff(stage):
            change = told["changed"][diff.region]
            assert [(hunk["removed"], hunk["made"]) for hunk in change["hunks"]] == [
                (hunk.removed, hunk.made) for hunk in diff.hunks
            ]
            for old, new in diff.pairing.pairs.items():
                assert change["renamed"].get(old, old) == new


def test_every_pass_says_what_it_is_for(published: Path, data: dict[str, Any]) -> None:
    for stage in data["stages"][1:]:
        assert stage["about"]["purpose"]
        assert [part for part in stage["about"]["rest"] if "title" in part]


def test_near_misses_read_as_the_compiler_tells_them(data: dict[str, Any]) -> None:
    told = [text for stage in data["stages"] for text in stage.get("misses", ())]
    assert told
    assert [text for text in told if not re.match(r"(\S+: )?node \w+: ", text)] == []


def test_an_artifact_that_does_not_say_has_a_report(tiny: Path, tmp_path: Path) -> None:
    older = tmp_path / "artifact"
    shutil.copytree(tiny / "artifact", older)
    (older / ABOUT).unlink()
    edit_manifest(
        older,
        lambda data: data.update(files=[f for f in data["files"] if f["path"] != ABOUT]),
    )
    assert {stage.get("about") for stage in payload(Store.open(older))["stages"]} == {None}


def test_the_file_is_small(data: dict[str, Any]) -> None:
    assert len(document(data).encode()) < LIMIT


class _Links(html.parser.HTMLParser):
    """Links of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_nothing_is_loaded(data: dict[str, Any]) -> None:
    page = document(data)
    parser = _Links()
    parser.feed(page)
    assert not parser.links
    assert set(re.findall(r"https?://[^\s\"'<)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_text_of_an_artifact_stays_text(data: dict[str, Any]) -> None:
    evil = "</script><script>alert(1)</script><!--<script>"
    named = {**data, "name": evil, "lines": [{**data["lines"][0], "c": evil}, *data["lines"][1:]]}
    page = document(named)
    parser = _Links()
    parser.feed(page)
    assert parser.tags.count("script") == 2, "the data and the code"
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert json.loads(text)["lines"][0]["c"] == evil


def site(number: int, layer: int, error: float, problem: str = "") -> SiteReport:
    return SiteReport(
        number, "absorb_mla", number, "moe", "self_attn", layer, "captured", False, error, error,
        None, None, None, 1e-5, 1e-5, 1.0, 1e-12, ("a", "b"), problem,
    )  # fmt: skip


def test_the_worst_of_each_rewrite_is_kept(tmp_path: Path) -> None:
    sites = [site(1, 0, 1e-7), site(1, 4, 3e-6), site(2, 3, 1e-6, "wrong"), site(2, 5, 2e-6)]
    report = VerifyReport(
        40, (40,), 16, [PassReport("absorb_mla", "tolerance", 2, error=3e-6)], sites
    )
    found = numerics(report.write(tmp_path))
    worst = found["sites"]["absorb_mla"]
    assert (worst["1"]["layer"], worst["1"]["error"]) == (4, 3e-6)
    assert worst["2"]["problem"] == "wrong", "what is wrong is worse than any error"
    assert found["passes"]["absorb_mla"]["error"] == 3e-6


def test_an_error_that_is_not_finite_is_the_worst(tmp_path: Path) -> None:
    sites = [site(1, 0, 1e-3), site(1, 4, math.inf), site(1, 5, 1e-2)]
    passes = [PassReport("absorb_mla", "tolerance", 1, error=math.inf)]
    found = numerics(VerifyReport(40, (40,), 16, passes, sites).write(tmp_path))
    worst = found["sites"]["absorb_mla"]["1"]
    assert (worst["layer"], worst["error"]) == (4, None)


def test_a_kernel_that_is_wrong_is_told(tmp_path: Path) -> None:
    place = "reference", "moe.long", "node", 3
    kernels = [
        KernelReport("dsa.rms_norm.default", *place, 2.0, "off"),
        KernelReport("dsa.router.default", *place, 0.5),
    ]
    report = VerifyReport(40, (40,), 16, kernels=kernels)
    found = numerics(report.write(tmp_path))
    assert (found["ok"], found["kernels"]) == (False, ["dsa.rms_norm.default by reference: off"])
    data = report.to_json()
    del data["kernels"]  # as reports were
    (tmp_path / "verify.json").write_text(json.dumps(data))
    assert numerics(tmp_path / "verify.json")["kernels"] == []


def bench_file(path: Path, ops: dict[str, Share]) -> Path:
    """As ``dsa-bench step --by-op --ablate -o FILE`` writes, which needs a GPU to run."""
    row = Row("decode 32", step=12.0, layer=0.2, host=0.1, wall=12.5, ops=ops, kind="moe")
    without = Ablated("quantize_experts", {"decode 32": 0.25})
    path.write_text(json.dumps({"rows": [asdict(row)], "ablation": [asdict(without)]}))
    return path


def test_times_go_to_the_calls_of_the_finished_graph(published: Path, tmp_path: Path) -> None:
    ops = {
        "experts_fp8 mlp": Share(80.0, 2.0, {"k": 80.0}),
        "router mlp.gate": Share(5.0, 1.0, ["r"]),
    }
    [case] = times(Store.open(published), bench_file(tmp_path / "bench.json", ops))
    assert case["region"].startswith("moe")
    assert set(case["calls"].values()) == {80.0, 5.0}
    assert case["passes"]["quantize_experts"] == 80.0
    assert case["saved"]["quantize_experts"] == pytest.approx(50.0)
    finished = Store.open(published).final[case["region"]]
    assert {finished.nodes[name].op_name for name in case["calls"]} == {"experts_fp8", "router"}


def test_the_command_writes_the_report(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "report.html"
    assert main([str(tiny / "artifact"), "html", "-o", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(out), "bytes": out.stat().st_size}


@pytest.mark.parametrize("found", [True, False])
def test_the_report_can_be_opened_at_once(tiny: Path, tmp_path: Path, found: bool) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened\nexit {0 if found else 1}\n')
    browser.chmod(0o755)
    out = tmp_path / "a report.html"
    command = [sys.executable, "-m", "dsa_compile.cli.inspect", str(tiny / "artifact"), "html"]
    environment = {**os.environ, "BROWSER": str(browser), "PATH": ""}
    done = subprocess.run(
        [*command, "-o", str(out), "--open"], env=environment, capture_output=True, text=True
    )
    assert (tmp_path / "opened").read_text().strip() == out.as_uri()
    assert out.is_file()
    if found:
        assert (done.returncode, done.stderr) == (0, "")
    else:
        assert done.returncode == 2
        assert "written, but no browser was found" in done.stderr


def test_options_may_stand_before_the_command(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "report.html"
    before = ["--verify", str(tmp_path / "absent.json")]
    assert main([str(tiny / "artifact"), *before, "html", "-o", str(out)]) == 2
    assert "absent.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-o", "/nowhere/report.html"], "create it first"),
        (["--verify", "/nowhere/verify.json"], "dsa-inspect ARTIFACT verify writes it"),
        (["--bench", "{bad}"], "not times of steps"),
        (["--verify", "{bad}"], "not the report of verify"),
    ],
)
def test_what_is_wrong_is_said(
    tiny: Path, tmp_path: Path, capsys: Any, options: list[str], complaint: str
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    given = [option.replace("{bad}", str(bad)) for option in options]
    out = tmp_path / "report.html"
    assert main([str(tiny / "artifact"), "html", "-o", str(out), *given]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [True, None, 3, "T", [[]], {"a": 1}])
def test_a_damaged_record_is_said(tiny: Path, tmp_path: Path, capsys: Any, wrong: object) -> None:
    """Whatever stands for a shape; the manifest fits the file."""
    damaged = tmp_path / "artifact"
    shutil.copytree(tiny / "artifact", damaged)
    name = Store.open(damaged).manifest.exported
    assert name is not None
    text = re.sub(
        r'"shape": ?\[[^]]*\]', f'"shape": {json.dumps(wrong)}', (damaged / name).read_text()
    )
    forge(damaged, name, text.encode())
    status = main([str(damaged), "html", "-o", str(tmp_path / "report.html")])
    error = capsys.readouterr().err
    assert status == 0 or (status == 2 and error.count("\n") == 1)


def test_a_report_that_cannot_be_written_leaves_the_last_one(
    published: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    out = tmp_path / "report.html"
    assert main([str(published), "html", "-o", str(out)]) == 0
    before = out.read_bytes()

    def full(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full)
        assert main([str(published), "html", "-o", str(out)]) == 2
    assert "report.html: cannot be written (No space left on device)" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]
