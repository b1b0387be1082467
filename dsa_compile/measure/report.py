"""Results as tables and a chart."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from dsa_compile.measure.case import is_ours
from dsa_compile.measure.machine import machine
from dsa_compile.measure.run import Row, best_peer
from dsa_compile.measure.timing import Ceilings


def case_table(rows: Sequence[Row], title: str) -> Table:
    """All candidates of the cases of one op: time, share of the limit, gain over the best peer."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("shape", overflow="fold")
    table.add_column("provider", overflow="fold")
    for column in ("µs", "of limit", "best peer ÷ this"):
        table.add_column(column, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        same = [r for r in rows if r.case == row.case]
        shape = "" if row.case == previous else row.case
        previous = row.case
        if row.us is None:
            told = f"[red]{row.problem}[/red]" if row.problem else "right"
            table.add_row(shape, row.provider, told, "", "")
            continue
        peer = best_peer(same)
        gain = f"{peer / row.us:.2f}" if peer and is_ours(row.provider) else ""
        table.add_row(
            shape, row.provider, f"{row.us:.1f}", f"{100 * row.limit_us / row.us:.0f} %", gain
        )
    return table


def family_table(rows: Sequence[Row], title: str) -> Table:
    """Median and worst over the families of each shape, and what went wrong."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("shape", overflow="fold")
    table.add_column("provider", overflow="fold")
    for column in ("median µs", "worst µs", "best peer ÷ worst"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("worst family", overflow="fold")
    for shape, provider in dict.fromkeys((row.shape, row.provider) for row in rows):
        some = [r for r in rows if (r.shape, r.provider) == (shape, provider)]
        timed = [(r.us, r.family) for r in some if r.us is not None]
        for problem in dict.fromkeys(row.problem for row in some if row.problem):
            first = next(row.family for row in some if row.problem == problem)
            table.add_row(shape, provider, "", "", "", f"[red]{first}: {problem}[/red]")
        if timed:
            us, family = max(timed)
            peer = best_peer(r for r in rows if (r.shape, r.family) == (shape, family))
            gain = f"{peer / us:.2f}" if peer and is_ours(provider) else ""
            median = statistics.median(us for us, _ in timed)
            table.add_row(shape, provider, f"{median:.1f}", f"{us:.1f}", gain, family)
    return table


def to_markdown(rows: Sequence[Row], ceilings: Ceilings) -> str:
    """One table an op: a row a case, a column a provider, in microseconds.

    Bold is the fastest; "limit" is what the machine's ceilings allow; a dash was not measured.
    """
    versions = ", ".join(f"{name} {value}" for name, value in machine().items() if name != "gpu")
    rates = ", ".join(f"{k} {v / 1e6:,.0f} TFLOP/s" for k, v in ceilings.flops_per_us.items())
    memory = f"memory {ceilings.bytes_per_us / 1e6:.2f} TB/s"
    lines = [
        f"{machine()['gpu']}; {versions}.",
        f"Ceilings measured in the same run: {memory}, {rates}.",
    ]
    for op in dict.fromkeys(row.op for row in rows):
        some = [row for row in rows if row.op == op]
        providers = sorted(
            dict.fromkeys(row.provider for row in some if row.us), key=lambda p: not is_ours(p)
        )
        heads = ["", *providers, "limit", "best peer ÷ ours"]
        lines += ["", f"### {op}", "", _line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
        for case in dict.fromkeys(row.case for row in some):
            lines.append(_line(_cells(case, providers, [r for r in some if r.case == case])))
    return "\n".join(lines) + "\n"


def _cells(shape: str, providers: Sequence[str], rows: Sequence[Row]) -> list[str]:
    times = {row.provider: row.us for row in rows if row.us is not None}
    best = min(times.values(), default=0.0)
    shown = []
    for provider in providers:
        us = times.get(provider)
        text = "–" if us is None else f"{us:,.1f}"
        shown.append(f"**{text}**" if us == best and us else text)
    limit = max((row.limit_us for row in rows), default=0.0)
    own = min((us for name, us in times.items() if is_ours(name)), default=None)
    peer = best_peer(rows)
    return [shape, *shown, f"{limit:,.1f}", f"{peer / own:.2f}" if own and peer else "–"]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plot(path: Path, rows: Sequence[Row]) -> None:
    """A bar chart: for every case our best kernel and the best peer, as shares of the limit."""
    from matplotlib.figure import Figure

    labels: list[str] = []
    ours: list[float] = []
    peers: list[float] = []
    for op, case in dict.fromkeys((row.op, row.case) for row in rows):
        timed = [r for r in rows if (r.op, r.case) == (op, case) and r.us]
        own = [r.limit_us / r.us for r in timed if r.us and is_ours(r.provider)]
        other = [r.limit_us / r.us for r in timed if r.us and not is_ours(r.provider)]
        if own:
            labels.append(f"{op} {case}")
            ours.append(100 * max(own))
            peers.append(100 * max(other, default=0.0))
    figure = Figure(figsize=(9, 1 + 0.28 * len(labels)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(labels))
    axes.barh([p - 0.2 for p in places], ours, 0.4, label="dsa-compile")
    axes.barh([p + 0.2 for p in places], peers, 0.4, label="best peer", color="0.7")
    axes.set_yticks(list(places), labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the machine's limit (measured memory bandwidth and matrix rate)")
    axes.legend()
    figure.savefig(path, dpi=110)
