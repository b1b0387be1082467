"""The benchmark's harness, without a GPU: which candidates are timed and what is said of them."""

import contextlib
import importlib.util
import io
import json
import sys

import pytest
import torch
from rich.console import Console

from dsa_compile.cli.bench import main
from dsa_compile.cli.bench import run as command
from dsa_compile.measure import kept, machine, report, run
from dsa_compile.measure.case import Case, Plan, is_ours
from dsa_compile.measure.suites import SUITES, all_plans
from dsa_compile.measure.timing import Ceilings

CEILINGS = Ceilings(4e6, {"bf16": 8e8, "fp8": 1.3e9})


def fail():
    raise RuntimeError("no such kernel\nsecond line")


def plan(**candidates):
    return Plan(
        "op",
        "1×2",
        lambda: Case(
            {name: [call] for name, call in candidates.items()},
            lambda result: None if result == 1 else "off by one",
            bytes=8e6,
            flops=1.6e9,
            unavailable={"vllm": "not installed"},
        ),
    )


@pytest.fixture
def quick(monkeypatch):
    """Every right candidate takes 4 µs times the number of its letters."""
    names = {}
    monkeypatch.setattr(run, "graph_median", lambda calls: names[calls[0]])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(run, "shared", contextlib.nullcontext)
    monkeypatch.setattr(run, "exclusive", contextlib.nullcontext)

    def make(**candidates):
        names.update({call: 4.0 * len(name) for name, call in candidates.items()})
        return plan(**candidates)

    return make


def test_only_what_is_right_is_timed(quick):
    (rows,) = run.run_plans(
        [quick(triton=lambda: 1, cuda=lambda: 2, peer=fail, torch=lambda: 1)], CEILINGS
    )
    told = {row.provider: (row.us, row.problem) for row in rows}
    assert told["triton"] == (24.0, None)
    assert told["torch"] == (20.0, None)
    assert told["cuda"] == (None, "off by one")
    assert told["peer"][0] is None
    assert told["peer"][1].startswith("RuntimeError: no such kernel (test_bench.py:")
    assert told["vllm"] == (None, "not installed")
    assert all(row.limit_us == 2.0 for row in rows[:4])
    assert run.best_peer(rows) == 20.0


def test_a_case_that_cannot_be_made_is_a_row(quick):
    (rows,) = run.run_plans([Plan("op", "shape", fail)], CEILINGS)
    assert [(row.us, row.problem[:28]) for row in rows] == [(None, "RuntimeError: no such kernel")]


def test_checking_times_nothing(quick):
    plans = [quick(triton=lambda: 1, torch=lambda: 2)]
    (rows,) = run.run_plans(plans, CEILINGS, timed=False)
    assert [(row.us, row.problem) for row in rows[:2]] == [(None, None), (None, "off by one")]


def test_providers_can_be_chosen(quick):
    plans = [quick(triton=lambda: 1, torch=lambda: 1)]
    (rows,) = run.run_plans(plans, CEILINGS, lambda name: name == "triton")
    assert [row.provider for row in rows] == ["triton", "vllm"]


def test_ours_and_peers():
    assert [is_ours(name) for name in ("triton", "cuda/cluster", "gluon", "torch", "cudalike")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")


def test_peers_are_told(tmp_path, monkeypatch, gpu):
    """Also those that are no installed distribution, or part of one with another name."""
    if importlib.util.find_spec("flash_mla") or importlib.util.find_spec("deep_gemm"):
        pytest.skip("flash_mla or deep_gemm is installed")
    assert "flash_mla" not in machine.machine()
    (tmp_path / "flash_mla.py").touch()
    (tmp_path / "deep_gemm.py").touch()
    (tmp_path / "engine-1.2.dist-info").mkdir()
    (tmp_path / "engine-1.2.dist-info/METADATA").write_text("Name: engine\nVersion: 1.2\n")
    (tmp_path / "engine-1.2.dist-info/top_level.txt").write_text("deep_gemm\n")
    monkeypatch.syspath_prepend(tmp_path)
    machine._distributions.cache_clear()
    found = machine.machine()
    assert found["flash_mla"] == "unversioned"
    assert found["deep_gemm"] == "engine 1.2"
    assert found["torch"] == torch.__version__
    machine._distributions.cache_clear()


def test_the_driver_is_told(tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "driver" not in machine.machine()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 580.95.05\n")
    tool.chmod(0o755)
    assert machine.machine()["driver"] == "580.95.05"


def test_a_kept_command_names_no_folder_of_the_machine():
    argv = ["/usr/bin/dsa-bench", "kernels", "--only", "top-k to", "-o", "/home/me/out/k.json"]
    assert machine.command(argv) == "dsa-bench kernels --only 'top-k to' -o k.json"


def test_kept_figures(quick, monkeypatch, tmp_path, gpu):
    """Times, limits, shares and what was wrong, a case a line."""
    plans = [quick(triton=lambda: 1, torch=lambda: 1, cuda=lambda: 2), Plan("op", "3", fail)]
    rows = [row for some in run.run_plans(plans, CEILINGS) for row in some]
    kept.write(tmp_path / "k.json", kept.kernels(rows, CEILINGS))
    text = (tmp_path / "k.json").read_text()
    data = json.loads(text)
    assert data["machine"]["gpu"] == "GPU"
    assert data["command"]
    assert data["ceilings"]["bytes_per_us"] == 4_000_000
    case, lost = data["cases"]
    assert case == {
        "op": "op", "shape": "1×2", "bytes": 8_000_000, "flops": 1_600_000_000, "limit_us": 2.0,
        "us": {"triton": 24.0, "torch": 20.0}, "of_limit": {"triton": 0.083, "torch": 0.1},
        "wrong": {"cuda": "off by one"}, "unavailable": {"vllm": "not installed"},
    }  # fmt: skip
    assert lost["wrong"]["-"].startswith("RuntimeError: no such kernel")
    assert sum('"op": "op"' in line for line in text.splitlines()) == 2, "a case a line"


def test_kept_figures_are_rounded():
    assert kept.rounded({"a": [12.345678, 1.7e9, 3, True, "x", None]}) == {
        "a": [12.346, 1_700_000_000, 3, True, "x", None]
    }


def test_markdown_names_the_fastest(quick, monkeypatch):
    monkeypatch.setattr(report, "machine", lambda: {"gpu": "GPU", "torch": "2"})
    (rows,) = run.run_plans([quick(triton=lambda: 1, torch=lambda: 1, wrong=lambda: 2)], CEILINGS)
    text = report.to_markdown(rows, CEILINGS)
    assert "| 1×2 | 24.0 | **20.0** | 2.0 | 0.83 |" in text
    assert "wrong" not in text


def test_families_come_as_median_and_worst():
    times = {"even": (3.0, 9.0), "odd": (7.0, 8.0), "tied": (4.0, 8.5)}
    rows = [
        run.Row("op", "1×2", provider, us, 1.0, family=family)
        for family, both in times.items()
        for provider, us in zip(("cuda", "torch"), both, strict=True)
    ]
    rows.append(run.Row("op", "1×2", "cuda", None, 1.0, "not the largest scores", "odd"))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.family_table(rows, "op"))
    lines = [line.split("│") for line in console.export_text().splitlines() if "1×2" in line]
    cells = [[cell.strip() for cell in line[1:-1]] for line in lines]
    assert ["1×2", "cuda", "4.0", "7.0", "1.14", "odd"] in cells
    assert ["1×2", "torch", "8.5", "9.0", "", "even"] in cells
    assert ["1×2", "cuda", "", "", "", "odd: not the largest scores"] in cells


def test_plans_have_distinct_names():
    pytest.importorskip("triton")
    plans = list(all_plans())
    assert {suite for suite, _ in plans} == set(SUITES)
    names = [plan.name for _, plan in plans]
    assert len(set(names)) == len(names)


def test_list_and_refusals(capsys, monkeypatch):
    pytest.importorskip("triton")
    assert command(["kernels", "--list", "--only", "topk"]) == 0
    assert "131,072" in capsys.readouterr().out
    assert command(["kernels", "--list", "--only", "topk", "--skip", "131,072"]) == 0
    left = capsys.readouterr().out
    assert "9,295" in left
    assert "131,072" not in left
    monkeypatch.setattr(sys, "argv", ["dsa-bench", "kernels", "--only", "nonsense"])
    assert main() == 2
    assert "no case matches nonsense" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["dsa-bench", "kernels", "--only", "topk", "--skip", "top"])
    assert main() == 2
    assert "no case matches topk without top" in capsys.readouterr().err
    if not torch.cuda.is_available():
        monkeypatch.setattr(sys, "argv", ["dsa-bench", "kernels", "--only", "topk"])
        assert main() == 2
        assert "needs a CUDA GPU" in capsys.readouterr().err
