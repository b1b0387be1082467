"""Tables at any width: no line is longer, no digit is lost, and rows keep their names."""

import io

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from dsa_compile.cli.tables import console, show, table

NUMBERS = [f"{n}{n}.{n:03}" for n in range(100, 113)]


def printed(shown: Table, width: int) -> list[str]:
    out = io.StringIO()
    show(Console(file=out, width=width), shown)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("lines", [False, True])
def test_many_numbers_go_below_one_another(width: int, lines: bool) -> None:
    heads = [f"figure {n}" for n in range(len(NUMBERS))]
    if lines:
        shown = Table(box=box.SIMPLE_HEAD)
        shown.add_column("artifact", overflow="fold")
        for head in heads:
            shown.add_column(head, justify="right", no_wrap=True)
    else:
        shown = table("artifact", *heads, right=tuple(heads))
    for name in ("one", "another"):
        shown.add_row(name, *NUMBERS)
    found = printed(shown, width)
    assert max(map(len, found)) <= width
    text = " ".join(found).split()
    assert [text.count(number) for number in NUMBERS] == [2] * len(NUMBERS)
    parts = text.count("artifact")
    assert parts > 1
    assert text.count("another") == parts


def test_texts_fold_and_keep_every_letter() -> None:
    shown = table("pass", "nodes", "problem", right=("nodes",))
    shown.add_row("fuse_norm_quantize_across_layers", "123456", "differs by 0.25 in layer 1 " * 4)
    found = printed(shown, 60)
    assert max(map(len, found)) <= 60
    assert "123456" in " ".join(found)
    letters = "".join("".join(found).split())
    assert letters.count("differsby0.25") <= 4
    assert "…" not in letters


def test_no_colour_where_nobody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = table("pass", "nodes", right=("nodes",))
    shown.add_row("absorb_mla", "5", style="red")
    show(console(), shown)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    show(console(), shown)
    assert "\x1b[31m" not in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["0", "5"])
def test_a_terminal_without_a_width_shows_something(columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    out = console()
    out.file = io.StringIO()
    shown = table("pass", "purpose")
    shown.add_row("quantize_projections", "FP8 blocks")
    show(out, shown)
    assert "quantize_projections" in out.file.getvalue()
