"""Summary that ``dsa-compile`` prints of an artifact that it has made, in words or as data."""

import shlex
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dsa_compile.cli.tables import console, print_json, table

if TYPE_CHECKING:
    from dsa_compile.lowering.compile_result import CompileResult


def print_text(result: "CompileResult", seconds: float, kernels: bool) -> None:
    """Print the rewrites of every pass, the time by phase, and what to do next.

    Args:
        result: of the compilation.
        seconds: since the command began.
        kernels: print also which kernel was bound to each op, and why.
    """
    out = console()
    _print_passes(out, result)
    phases = ", ".join(f"{name} {value:.1f} s" for name, value in result.seconds.items())
    rows = [("time", f"{seconds:.1f} s in all: {phases}")]
    rows += [("note", note) for note in result.notes]
    rows += [
        ("artifact", str(result.path)),
        ("graphs", f"{result.path / 'graphs'} (to read: *.py)"),
        ("passes", f"{result.path / 'passes'} (before.py, after.py, changes.diff)"),
        ("next", _next(result)),
    ]
    for name, text in rows:
        out.print(f"{name + ':':<10}{text}", soft_wrap=True, markup=False)
    if kernels:
        from dsa_compile.lowering.explain import kernel_table

        out.print(kernel_table(result.bindings))


def _print_passes(out: Console, result: "CompileResult") -> None:
    numbers = ("rewrites", "expected", "nodes before", "after", "ms")
    shown = table("pass", *numbers, right=numbers, line=True)
    for record in result.program.records:
        shown.add_row(
            record.name,
            str(record.rewrites),
            "" if record.expected is None else str(record.expected),
            str(record.nodes_before),
            str(record.nodes_after),
            f"{1e3 * record.seconds:.0f}",
        )
    out.print(shown)


def print_data(result: "CompileResult", seconds: float) -> None:
    """Print what ``--json`` promises in the help."""
    print_json(as_data(result, seconds))


def as_data(result: "CompileResult", seconds: float) -> dict[str, Any]:
    """The object that ``--json`` prints; its fields are in the command's help."""
    manifest = result.manifest
    return {
        "artifact": str(result.path.absolute()),
        "digest": manifest.digest,
        "target": manifest.target,
        "recipe": manifest.recipe,
        "options": manifest.compile.to_json(),
        "seconds": {"all": round(seconds, 3)}
        | {name: round(value, 3) for name, value in result.seconds.items()},
        "passes": [
            {
                "name": summary.name,
                "rewrites": summary.rewrites,
                "expected": summary.expected,
                "nodes_before": summary.nodes_before,
                "nodes_after": summary.nodes_after,
                "seconds": round(took, 4),
            }
            for summary, took in result.timed_passes()
        ],
        "kernels": {
            op: [record.provider for record in records] for op, records in manifest.kernels.items()
        },
        "notes": list(result.notes),
    }


def _next(result: "CompileResult") -> str:
    if result.manifest.compile.stop_after:
        return "read the graphs; stopped early, the artifact cannot run"
    if result.manifest.weights.mode == "none":
        return "read the graphs; without weights, the artifact cannot run"
    speaks = any(path.endswith("/tokenizer.json") for path in result.manifest.tokenizer)
    prompt = '--prompt "Hello"' if speaks else '--prompt-ids "1 2 3"'
    return f"dsa-generate {shlex.quote(str(result.path))} {prompt}"
