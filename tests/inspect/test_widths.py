"""Tables at the widths that terminals have: nothing is cut off, numbers keep their digits."""

import json
import re
from pathlib import Path

import pytest

from dsa_compile.cli.inspect.command import artifact_first, main

WIDTHS = (60, 80, 100, 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_of_passes_keeps_numbers_and_names(
    published: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([str(published)]) == 0
    shown = capsys.readouterr().out
    text = shown[shown.index("near-") :]
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    manifest = json.loads((published / "manifest.json").read_text())
    seconds = json.loads((published / "timings.json").read_text())
    for number, summary in enumerate(manifest["passes"], start=1):
        (line,) = re.findall(rf"^ *{number} .*", text, re.MULTILINE)
        figures = (summary["rewrites"], summary["nodes_before"], summary["nodes_after"])
        milliseconds = f"{1e3 * seconds[summary['name']]:.0f}"
        words = line.split()
        assert [str(figure) for figure in figures if str(figure) not in words] == []
        assert milliseconds in words
        if width >= 80:
            assert words[1] == summary["name"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("diff {a} absorb_mla", "{a} diff absorb_mla"),
        ("diff absorb_mla {a} --layer 2", "{a} diff absorb_mla --layer 2"),
        ("near-miss {a} absorb_mla", "{a} near-miss absorb_mla"),
        ("compare {a} {a}", "{a} compare {a}"),
        ("diff nowhere absorb_mla", "nowhere diff absorb_mla"),
        ("{a} diff absorb_mla", "{a} diff absorb_mla"),
        ("{a}", "{a}"),
        ("diff", "diff"),
    ],
)
def test_the_command_may_come_first(tmp_path: Path, given: str, meant: str) -> None:
    words = given.format(a=tmp_path).split()
    assert artifact_first(words) == meant.format(a=tmp_path).split()


def test_both_orders_answer_alike(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(published), "absorb_mla"]) == 0
    first = capsys.readouterr().out
    assert main([str(published), "diff", "absorb_mla"]) == 0
    assert first == capsys.readouterr().out
