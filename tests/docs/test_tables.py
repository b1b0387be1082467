"""Tables of kept figures: the pages have what the files say, and the files are read rightly."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.measure.step.cases import Decode, Mixed, Prefill
from tests.docs import tables
from tests.docs.commands import ROOT
from tests.docs.kernel_tables import HIGHLIGHTS, us
from tests.docs.pages import PAGES
from tests.docs.tables import KINDS, filled, marked, read

MARKED = [page for page in PAGES if marked((ROOT / page).read_text(encoding="utf-8"))]
MACHINE = {"gpu": "NVIDIA H200", "date": "2026-11-22", "driver": "580.95", "torch": "2.11.0"}


@pytest.mark.parametrize("page", MARKED)
def test_tables_are_those_of_the_kept_figures(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == filled(text), f"run python -m tests.docs.tables {page}"


@pytest.mark.parametrize("page", MARKED)
def test_every_mark_names_a_kind_with_its_arguments(page: str) -> None:
    """Marks whose figures are not kept yet must do so too."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = marked(text)
    for table in found:
        inspect.signature(KINDS[table.kind]).bind({}, **table.arguments)
        assert table.pattern.startswith("results/")
    assert len(found) == text.count("<!-- table:") == text.count("<!-- end -->")


def test_kept_results_are_small() -> None:
    """Results are read by people, and travel with every checkout."""
    large = [p.name for p in (ROOT / "docs/results").glob("*.json") if p.stat().st_size > 600_000]
    assert not large


def case(op: str, shape: str, us: dict[str, float | None], **more: Any) -> dict[str, Any]:
    return {"op": op, "shape": shape, "bytes": 10, "flops": 0, "limit_us": 2.0, "us": us, **more}


KERNELS = [
    case("top-k", "64×9,295", {"cuda": 4.0, "torch": 74.7, "vllm/per row": 6.0}),
    case("top-k", "1×9,295", {"cuda": 4.3, "torch": 61.0}, wrong={"vllm/per row": "columns"}),
    case("mla prefill", "128 × 128 heads", {"flash_mla": 90.0, "cuda": 100.0}, flops=7e10),
    case("linear_fp8", "1×q_b", {"cuda": 9.6, "deep_gemm": 13.8, "torch": 1.0}),
    case("linear_fp8", "1×o_proj", {"cuda": 28.7, "deep_gemm": 39.0}),
    case("linear_fp8", "64×q_b", {"cuda": 12.6}, unavailable={"deep_gemm": "not installed"}),
    case("linear_fp8", "64×o_proj", {"cuda": 33.6, "deep_gemm": 34.9}),
    case("linear_fp8", "1×dense down", {"cuda": 32.9, "deep_gemm": 1.0}),
    case("rms_norm", "4,096×7,168", {"triton": 31.1}),
    case("write_index_key_fp8", "4,096", {"cuda": 2.9, "triton": None}),
    case("copy of the same bytes", "rms_norm 7,168, 4,096", {"torch": 29.8}),
    case("absorb", "1", {"cuda": 5.2, "torch": 8.2}),
    case("expand", "1", {"cuda": 5.7, "torch": 5.5}),
    case("absorb", "64", {"torch": 10.8}),
    case("families", "1×2,049", {"cuda": 3.0, "torch": 9.0}, family="even"),
    case("families", "1×2,049", {"cuda": 6.0, "torch": 9.5}, family="odd"),
    case("families", "1×2,049", {"torch": 9.5}, family="tied", wrong={"cuda": "not the largest"}),
]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with ``docs/results/k.json`` and ``s.json``."""
    folder = tmp_path / "docs/results"
    folder.mkdir(parents=True)
    head = {"machine": MACHINE, "command": "dsa-bench kernels --only 'top-k'"}
    rates = {"ceilings": {"bytes_per_us": 4.47e6, "flops_per_us": {"fp8": 1.4e9}}}
    (folder / "k.json").write_text(json.dumps({**head, **rates, "cases": KERNELS}))
    steps = {**head, "bytes_per_ms": 4.4e9, "rows": STEPS, "ablation": ABLATION}
    (folder / "s.json").write_text(json.dumps(steps))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return tmp_path


def lines(spec: str) -> list[str]:
    """Lines that a comment's table becomes, without the rule below the heads."""
    text = filled(f"before\n<!-- table: {spec} -->\nold\n<!-- end -->\nbehind\n")
    head, comment, *made, end, tail = text.splitlines()
    assert (head, tail) == ("before", "behind")
    assert comment.startswith("<!-- table:")
    assert end == "<!-- end -->"
    return [line for line in made if not line.startswith("| ---")]


def test_a_table_without_its_file_is_left(root: Path) -> None:
    assert lines("results/other*.json cases op=top-k") == ["old"]


def test_making_twice_changes_nothing(root: Path) -> None:
    text = "<!-- table: results/k.json cases op=top-k -->\n<!-- end -->\n"
    assert filled(filled(text)) == filled(text) != text


def test_cases(root: Path) -> None:
    """Ours first, the fastest bold, what is wrong named."""
    assert lines("results/k.json cases op=top-k head=rows") == [
        "| rows | `cuda` | `torch` | `vllm/per row` | best peer ÷ ours | limit | of limit |",
        "| 64×9,295 | **4.0** | 74.7 | 6.0 | 1.50 | 2.0 | 50% |",
        "| 1×9,295 | **4.3** | 61.0 | wrong | 14.19 | 2.0 | 47% |",
    ]
    assert lines('results/k.json cases op="mla *" tflops=yes')[1] == (
        "| 128 × 128 heads | 100.0 | **90.0** | 0.90 | 2.0 | 2% | 700 |"
    )
    several = lines('results/k.json cases op=rms_norm|write_* shape="4,096*" copies=yes')
    assert several[1] == "| rms_norm, 4,096×7,168 | – | **31.1** | 2.0 | 6% | 29.8 | 96% |".replace(
        "– | **31.1**", "**31.1** | –"
    )
    assert several[2] == "| write_index_key_fp8, 4,096 | – | **2.9** | 2.0 | 69% | – | – |"


def test_cases_that_are_missing_are_told(root: Path) -> None:
    with pytest.raises(ValueError, match="no case of op='nonsense'"):
        lines("results/k.json cases op=nonsense")


def test_a_grid_adds_up_what_it_shows(root: Path) -> None:
    assert lines(
        'results/k.json grid op=linear_fp8 columns="1 64" peer=deep_gemm shape="[!d]*"'
    ) == [
        "| ours / `deep_gemm` | 1 | 64 |",
        "| q_b | 9.6 / 13.8 | 12.6 / – |",
        "| o_proj | 28.7 / 39.0 | 33.6 / 34.9 |",
        "| **sum** | **38.3 / 52.8** | **46.2 / –** |",
    ]


def test_ops_beside_one_another(root: Path) -> None:
    assert lines("results/k.json beside op=absorb|expand") == [
        "|  | absorb: `cuda` | absorb: `torch` | expand: `cuda` | expand: `torch` |",
        "| 1 | **5.2** | 8.2 | 5.7 | **5.5** |",
        "| 64 | – | **10.8** | – | – |",
    ]


def test_families(root: Path) -> None:
    (_, row) = lines("results/k.json families op=families usual=even")
    wanted = "| 1×2,049 | 3.0 | 9.0 (`torch`) | 4.5 | 6.0 | 2.00 | odd | 9.5 (`torch`) "
    assert row == wanted + "| 2, 1 wrong | 0 |"


def test_highlights_are_those_that_were_measured(root: Path) -> None:
    rows = lines("results/k.json highlights")[1:]
    assert 0 < len(rows) < len(HIGHLIGHTS)
    assert not any("| – | – | – | – |" in row for row in rows)
    assert rows[0] == "| top-k 2,048 of 64 × 9,295 | 4.0 | 6.0 (`vllm/per row`) | 1.50 | 50% |"
    (projections,) = [row for row in rows if "projections, tokens: 1 " in row]
    assert projections == "| a layer's six FP8 projections, tokens: 1 | 38.3 | 40.0 | 1.04 | 10% |"


def test_highlights_name_cases_of_the_suites() -> None:
    pytest.importorskip("triton")
    from fnmatch import fnmatchcase

    from dsa_compile.measure.suites import all_plans

    plans = {(plan.op, plan.shape) for _, plan in all_plans()}
    for label, op, shape in HIGHLIGHTS:
        found = [name for name in plans if name[0] == op and fnmatchcase(name[1], shape)]
        assert len(found) == (6 if "six" in label else 1), label


def test_the_run_is_told_with_its_command(root: Path) -> None:
    text = " ".join(lines("results/k.json run"))
    assert text == (
        "NVIDIA H200, 2026-11-22, driver 580.95, torch 2.11.0, memory 4.47 TB/s, "
        "fp8 1,400 TFLOP/s; `dsa-bench kernels --only 'top-k'`."
    )
    assert all(len(line) <= 105 for line in lines("results/k.json run"))


def test_a_case_in_two_files_is_refused(root: Path) -> None:
    (root / "docs/results/k2.json").write_bytes((root / "docs/results/k.json").read_bytes())
    with pytest.raises(ValueError, match="in two files"):
        read("results/k*.json")


def step(label: str, gpu: float, layer: float = 0.2, **more: Any) -> dict[str, Any]:
    none = dict.fromkeys(("floor", "launches", "experts_hit", "gaps_us"))
    return {"case": label, "step": gpu, "layer": layer, "host": 0.1, "ops": {}, **none, **more}


def op(us: float) -> dict[str, Any]:
    return {"us": us, "launches": 1, "names": ["k"]}


STEPS = [
    step(Decode(1, 8192).label(), 1.4, 0.19, floor=0.152, launches=19.0, experts_hit=9.0,
         ops={"router mlp": op(6.0), "experts mlp": op(109.04)}),
    step(Decode(64, 8192).label(), 10.9, 2.5, ops={"experts mlp": op(2223.0)}),
    step(Prefill(8192, 8192).label(), 100.8, 20.5),
    step(Mixed(0, 8192, 512).label(), 17.0),
    step(Mixed(64, 8192, 512).label(), 18.0),
    step(Mixed(64, 8192, 512, False).label(), 19.0),
]  # fmt: skip
ABLATION = [
    {"name": "a+b", "layers": {"decode 1 × 8K": 0.2014, "decode 64 × 8K": 2.5}, "problem": ""},
    {"name": "c", "layers": {}, "problem": "d needs it"},
]


def test_steps(root: Path) -> None:
    head, first, _, prefill = lines("results/s.json steps")
    assert "vLLM 0.25.1, one H200, 2026" in head
    assert (
        first
        == "| decode 1 × 8K | 0.190 | 0.152 | 80% | 0.261 | 0.19 ✓ | 19 | 9 | 1.400 | – | 0.100 |"
    )
    assert prefill.startswith("| prefill 8K | 20.500 | – | – | 20.800 | 19 | – | – | 100.800 |")


def test_ops_of_steps(root: Path) -> None:
    assert lines('results/s.json ops cases="decode 1 × 8K; decode 64 × 8K"') == [
        "| µs | decode 1 × 8K | decode 64 × 8K |",
        "| `experts mlp` | 109.0 | 2,223.0 |",
        "| `router mlp` | 6.0 |  |",
        "| sum | 115.0 | 2,223.0 |",
    ]


def test_steps_that_were_not_timed_have_no_column(root: Path) -> None:
    head = lines('results/s.json ops cases="decode 1 × 8K; prefill 64K"')[0]
    assert head == "| µs | decode 1 × 8K |"
    with pytest.raises(ValueError, match="none of prefill 64K"):
        lines('results/s.json ops cases="prefill 64K"')


def test_ablation(root: Path) -> None:
    assert lines("results/s.json ablation") == [
        "| without | decode 1 × 8K | decode 64 × 8K |",
        "| – | 0.1900 ms | 2.5000 ms |",
        "| `a`, `b` | +6.0% | +0.0% |",
        "| `c`: d needs it | – | – |",
    ]


def test_mixed_steps_need_their_parts(root: Path) -> None:
    """The one without a graph has no chunk of its kind in the file."""
    assert lines("results/s.json mixed")[1:] == [
        "| decode 64 × 8K, chunk of 512 at 8K, CUDA graph | 10.90 | 17.00 | 18.00 | 0.65 |"
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (4.04, "4.0"), (999.94, "999.9"), (999.96, "1,000")]
)
def test_microseconds(value: float | None, text: str) -> None:
    assert us(value) == text
