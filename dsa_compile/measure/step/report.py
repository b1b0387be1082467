"""Results of steps as tables, data and plots."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from dsa_compile.measure.kept import provenance, rounded
from dsa_compile.measure.machine import machine
from dsa_compile.measure.step.ablation import Ablated
from dsa_compile.measure.step.cases import Case
from dsa_compile.measure.step.published import VLLM, goal, vllm
from dsa_compile.measure.step.run import Row

_HEADS = (
    "", "ms", "floor", "of floor", VLLM, "goal", "launches", "experts", "step ms",
    "gaps µs", "host ms", "wall ms",
)  # fmt: skip
_PUBLISHED = slice(_HEADS.index(VLLM), _HEADS.index("goal") + 1)


def step_table(cases: Sequence[Case], rows: Sequence[Row], kind: str, published: bool) -> Table:
    """A row a case.

    Args:
        cases: what was timed.
        rows: of each.
        kind: of the layer.
        published: another engine's times and our goals, which are of a certain layer, stand beside.
    """
    table = Table(title=f"One {kind} layer (difference of models), GPU", box=None, pad_edge=False)
    for head in _shown_columns(_HEADS, published):
        table.add_column(head, justify="right" if head else "left", no_wrap=bool(head))
    for case, row in zip(cases, rows, strict=True):
        table.add_row(*_shown_columns(_cells(case, row), published))
    return table


def to_markdown(cases: Sequence[Case], rows: Sequence[Row], kind: str, published: bool) -> str:
    """Markdown of :func:`step_table`, with the machine, and the ops of each traced case."""
    versions = ", ".join(f"{name} {value}" for name, value in machine().items() if name != "gpu")
    lines = [f"{machine()['gpu']}; {versions}.", "", f"One {kind} layer:", ""]
    heads = _shown_columns(_HEADS, published)
    lines += [_line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    lines += [
        _line(_shown_columns(_cells(case, row), published))
        for case, row in zip(cases, rows, strict=True)
    ]
    for row in rows:
        if row.ops:
            lines += [
                "",
                f"{row.case}, by op:",
                "",
                _line(["", "µs", "launches"]),
                "|---|---:|---:|",
            ]
            lines += [
                _line([label, f"{share.us:.1f}", f"{share.launches:g}"])
                for label, share in row.ops.items()
            ]
    return "\n".join(lines) + "\n"


def _cells(case: Case, row: Row) -> list[str]:
    other, aim = vllm(case), goal(case)
    return [
        row.case,
        f"{row.layer:.4f}",
        _shown(row.floor, 4),
        "–" if row.floor is None else f"{row.floor / row.layer:.0%}",
        _shown(other, 3),
        "–" if aim is None else f"{aim:g}{'' if row.layer > aim else ' ✓'}",
        _shown(row.launches, 1),
        _shown(row.experts_hit, 0),
        f"{row.step:.3f}",
        _shown(row.gaps_us, 1),
        f"{row.host:.3f}",
        f"{row.wall:.3f}" if row.wall else "–",
    ]


def _shown_columns(cells: Sequence[str], published: bool) -> list[str]:
    shown = list(cells)
    if not published:
        del shown[_PUBLISHED]
    return shown


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def op_table(row: Row, most: int = 24) -> Table:
    """Table of what each op adds to one layer."""
    table = Table(title=f"{row.case}: µs added to a layer, by op", box=None, pad_edge=False)
    table.add_column("op", overflow="fold")
    table.add_column("µs", justify="right", no_wrap=True)
    table.add_column("launches", justify="right", no_wrap=True)
    table.add_column("kernels", overflow="fold", max_width=60)
    for label, share in list(row.ops.items())[:most]:
        table.add_row(label, f"{share.us:.1f}", f"{share.launches:g}", ", ".join(share.names))
    total = sum(share.us for share in row.ops.values())
    table.add_row("sum", f"{total:.1f}", f"{row.launches or 0:g}", "")
    return table


def ablation_table(rows: Sequence[Row], entries: Sequence[Ablated]) -> Table:
    """A row a pass: how much longer a layer takes without it, in per cent of what it takes with."""
    whole = {row.case: row.layer for row in rows}
    cases = [case for case in whole if any(case in entry.layers for entry in entries)]
    table = Table(title="A layer without the pass: % longer", box=None, pad_edge=False)
    table.add_column("pass", overflow="fold")
    for case in cases:
        table.add_column(case, justify="right", no_wrap=True)
    table.add_column("")
    for entry in entries:
        changes = [
            f"{100 * (entry.layers[case] / whole[case] - 1):+.1f}" if case in entry.layers else "–"
            for case in cases
        ]
        table.add_row(entry.name, *changes, entry.problem)
    return table


def _shown(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def to_json(
    rows: Sequence[Row],
    kind: str,
    published: bool,
    ablation: Sequence[Ablated] = (),
    bytes_per_ms: float = 0.0,
) -> dict[str, Any]:
    """Measurements with machine, command and the memory bandwidth that floors are of.

    Milliseconds but for what ends in ``us``; ``of_floor`` is the floor's share of a layer's time.
    ``published`` says whether another engine's times are of such a layer.
    """
    return {
        **provenance(),
        "kind": kind,
        "published": published,
        "bytes_per_ms": rounded(bytes_per_ms),
        "rows": [rounded(_kept(row)) for row in rows],
        "ablation": [rounded(asdict(entry)) for entry in ablation],
    }


def _kept(row: Row) -> dict[str, Any]:
    share = {} if row.floor is None else {"of_floor": row.floor / row.layer}
    return asdict(row) | share


def plot(path: Path, cases: Sequence[Case], rows: Sequence[Row], published: bool) -> None:
    """Bars: a layer's time, where they are of such a layer the other engine's, and the floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 0.45 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    axes.barh([p - 0.2 for p in places], [r.layer for r in rows], 0.4, label="dsa-compile")
    if published:
        others = [vllm(case) or 0.0 for case in cases]
        axes.barh([p + 0.2 for p in places], others, 0.4, label=VLLM, color="0.7")
    floors = [(p, r.floor) for p, r in zip(places, rows, strict=True) if r.floor is not None]
    axes.plot(
        [f for _, f in floors], [p for p, _ in floors], "k|", ms=18, label="bytes ÷ bandwidth"
    )
    axes.set_yticks(list(places), [r.case for r in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("ms per layer")
    axes.legend()
    figure.savefig(path, dpi=110)
