"""The table of ``--explain-kernels``."""

from collections.abc import Sequence

from rich.table import Table

from dsa_compile.lowering.binding import Binding


def kernel_table(bindings: Sequence[Binding]) -> Table:
    """Table of every op of the program: what implements it, and what was considered and left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("op", overflow="fold", max_width=24)
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("provider", no_wrap=True)
    table.add_column("", overflow="fold", max_width=13)
    table.add_column("why", overflow="fold")
    for binding in bindings:
        label, calls = binding.op.split(".")[1], str(binding.calls)
        for candidate in binding.candidates:
            kernel = candidate.implementation
            state = "bound" if candidate.bound else "left"
            if candidate.bound and kernel.max_tokens is not None:
                state = f"bound ≤ {kernel.max_tokens} tokens"
            table.add_row(
                label,
                calls,
                kernel.provider,
                state,
                candidate.reason,
                style=None if candidate.bound else "dim",
            )
            label = calls = ""
    return table
