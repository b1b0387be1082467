"""Error of projecting several ranks from one: both are measured here, on as many GPUs as ranks.

    python benchmarks/projection_error.py ARTIFACT --ranks 2 [--concurrency 1,16] [-o FILE]

The collectives between these GPUs are timed first. Then all ranks run, and then the first one by
itself, with those times replayed; a process for each. ARTIFACT is of so many ranks; weights are
random.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BENCH = [sys.executable, "-m", "dsa_compile.cli.bench"]


def run(*arguments: str) -> int:
    """Run ``dsa-bench`` and return its exit status; what it prints goes to standard error."""
    print("dsa-bench", *arguments, file=sys.stderr, flush=True)
    return subprocess.run([*BENCH, *arguments], stdout=sys.stderr).returncode


def node(folder: Path, artifact: str, loads: list[str], *arguments: str) -> list[dict[str, Any]]:
    """Rows of ``dsa-bench node``."""
    output = folder / "node.json"
    given = [*arguments, "--load-format", "dummy", *loads, "-o", str(output)]
    if status := run("node", artifact, *given):
        raise SystemExit(f"dsa-bench node ended with status {status}")
    rows: list[dict[str, Any]] = json.loads(output.read_text())["rows"]
    return rows


def compared(real: list[dict[str, Any]], projected: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one load side by side, with the projection's error as a share of the measurement."""
    found = []
    for row, other in zip(real, projected, strict=True):
        assert row["load"] == other["load"], "the same loads in the same order"
        assert (row["projected"], other["projected"]) == (False, True)
        entry = {"load": row["load"], "provider": row["collectives"]["provider"]}
        for name in ("tpot_ms", "ttft_ms"):
            measured, guess = row["served"][name], other["served"][name]
            entry[name] = {
                "measured": measured,
                "projected": guess,
                "error": guess / measured - 1,
            }
        found.append(entry)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("artifact")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--providers", default="nccl,symmetric")
    parser.add_argument("--concurrency", default="1,16")
    parser.add_argument("--prompt-tokens", default="8K")
    parser.add_argument("--new-tokens", default="128")
    parser.add_argument("--latencies", help="of these GPUs; measured first by default")
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    loads = ["--concurrency", args.concurrency, "--prompt-tokens", args.prompt_tokens]
    loads += ["--new-tokens", args.new_tokens]
    print(f"{'collectives':<12} {'load':>14}      {'projected':>10} {'measured':>10} {'error':>7}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        latencies = args.latencies or str(folder / "latencies.json")
        if not args.latencies:  # a provider that sums wrongly is left out of the table
            run("collectives", "--ranks", str(args.ranks), "--table", latencies)
        for provider in args.providers.split(","):
            real = node(folder, args.artifact, loads, "--collectives", provider)
            replay = ["--collectives", "replay", "--rank", "0", "--of", str(args.ranks)]
            replay += ["--latencies", latencies, "--provider", provider, "--scale", "1"]
            found = compared(real, node(folder, args.artifact, loads, *replay))
            rows += found
            show(found)
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows of :func:`compared`."""
    for row in rows:
        load = row["load"]
        shape = f"{load['concurrency']}, {load['prompt_tokens']}/{load['new_tokens']}"
        for label, key in (("TPOT", "tpot_ms"), ("TTFT", "ttft_ms")):
            both = row[key]
            print(
                f"{row['provider']:<12} {shape:>14} {label} {both['projected']:>10.3f} "
                f"{both['measured']:>10.3f} {100 * both['error']:>+6.1f}%",
                flush=True,
            )


if __name__ == "__main__":
    main()
