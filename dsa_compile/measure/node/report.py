"""Rows of a node as tables."""

from collections.abc import Sequence

from rich.table import Table

from dsa_compile.measure.node.layer_profile import LayerProfile, StepProfile
from dsa_compile.measure.node.published import PUBLISHED
from dsa_compile.measure.node.run import Row

GIB = 2**30


def node_table(rows: Sequence[Row], title: str) -> Table:
    """Times of loads; ``projected`` is in the title where they are."""
    shown = _table(title)
    shown.add_column("collectives", overflow="fold")
    heads = ("TTFT\nms", "TPOT\nms", "tok/s\n/user", "decode\n/s/GPU", "output\n/s/GPU", "comm.\n%")
    for column in ("load", *heads):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        load, part = row.load, row.communication_ms
        numbers = (
            row.served.ttft_ms,
            row.served.tpot_ms,
            row.tokens_per_user,
            row.tokens_per_gpu,
            row.output_per_gpu,
        )
        shown.add_row(
            str(row.collectives),
            f"{load.concurrency} {_short(load.prompt_tokens)}/{_short(load.new_tokens)}",
            *map(_digits, numbers),
            "-" if part is None else f"{100 * part / row.served.tpot_ms:.1f}",
        )
    return shown


def basis_lines(rows: Sequence[Row]) -> list[str]:
    """Latencies that were not measured between so many ranks, a line each."""
    found = {
        row.collectives.provider: f"{row.collectives.provider}: latencies {row.basis} from other "
        "numbers of ranks"
        for row in rows
        if row.basis not in (None, "measured")
    }
    return list(found.values())


def published_table() -> Table:
    """Table of the figures that others have published."""
    shown = _table("published by others, measured elsewhere and otherwise")
    for column in ("system", "hardware", "load"):
        shown.add_column(column, overflow="fold")
    for column in ("TPOT\nms", "tokens/s\n/user", "output\n/s/GPU"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in PUBLISHED:
        numbers = (row.tpot_ms, row.tokens_per_user, row.tokens_per_gpu)
        cells = ("-" if number is None else f"{number:,.4g}" for number in numbers)
        shown.add_row(row.system, row.hardware, row.load, *cells)
    return shown


def profile_line(profile: StepProfile) -> str:
    """A step that was profiled: its length, that of each layer, and everything else."""
    parts = (
        f"{layer.kind}{'' if layer.layer is None else f' {layer.layer}'} {layer.us:.1f}"
        for layer in profile.layers
    )
    return (
        f"{profile.label}: a step {profile.gpu_ms:.3f} ms on the GPU, {profile.traced_ms:.3f} "
        f"traced; µs added: {', '.join(parts)}, all else {profile.rest_us:.1f}"
    )


def layer_table(layer: LayerProfile) -> Table:
    """Kernels of a layer in the order of their starts, and what each adds to the step."""
    what = f"layer {layer.layer}" if layer.layer is not None else "mean of its layers"
    shown = _table(
        f"{layer.kind}, {what}: {layer.us:.1f} µs, of them {layer.gaps:.1f} gaps "
        f"and {layer.collectives:.1f} replayed collectives"
    )
    shown.add_column("op", overflow="fold")
    shown.add_column("kernel", overflow="ellipsis", no_wrap=True, max_width=24)
    for column in ("blocks", "from", "to", "gap", "adds"):
        shown.add_column(column, justify="right", no_wrap=True)
    for part in layer.parts:
        times = (f"{us:.1f}" for us in (part.start, part.end, part.gap, part.added))
        shown.add_row(part.op, part.kernel, str(part.blocks or "-"), *times)
    return shown


def memory_line(planned: int | None, used: int | None) -> str:
    """Memory that was planned for and that is in use; empty where nothing was planned."""
    if planned is None or used is None:
        return ""
    return (
        f"memory of the rank: planned {planned / GIB:.2f} GiB, in use {used / GIB:.2f} "
        f"({100 * (used / planned - 1):+.1f} %)"
    )


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
        padding=(0, 2, 0, 0),
    )  # fmt: skip


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _digits(number: float) -> str:
    """Four digits, or all of those before the point."""
    decimals = 3 if number < 10 else 2 if number < 100 else 1 if number < 1000 else 0
    return f"{number:,.{decimals}f}"
