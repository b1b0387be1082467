"""Compile the real DeepSeek-V3.2 geometry without weights and report time and memory by phase.

    python benchmarks/compile_full_geometry.py [--recipe NAME] [--target NAME] [--json FILE]
    python benchmarks/compile_full_geometry.py --records 5    what recording costs

The configuration is the published one: 61 layers, 256 experts, hidden size 7,168, YaRN factor 40.
The compilation runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def compile_once(folder: Path, recipe: str, target: str, records: bool) -> dict[str, Any]:
    """Compile in this process; seconds from the first import on."""
    started = time.perf_counter()
    from dsa_compile.lowering.compile_model import compile_model

    imported = time.perf_counter() - started
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    options = {"recipe": recipe, "target": target, "records": records}
    options |= {"weights": "none", "compiled_kernels": False}  # the graphs alone
    result = compile_model(folder / "model", folder / "artifact", **options)
    used = resource.getrusage(resource.RUSAGE_SELF)
    files = [path for path in (folder / "artifact").rglob("*") if path.is_file()]
    return {
        "seconds": {"import": imported, **result.seconds},
        "total_seconds": time.perf_counter() - started,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_rss_bytes": used.ru_maxrss * 1024,
        "artifact_bytes": sum(path.stat().st_size for path in files),
        "passes": [
            {
                "name": record.name,
                "rewrites": record.rewrites,
                "expected": record.expected,
                "nodes_before": record.nodes_before,
                "nodes_after": record.nodes_after,
                "seconds": record.seconds,
            }
            for record in result.program.records
        ],
    }


def report(data: dict[str, Any]) -> None:
    """Print the tables."""
    width = max(len(p["name"]) for p in data["passes"])
    print(f"{'pass':<{width}}  rewrites  expected  nodes before  after      ms")
    for p in data["passes"]:
        expected = "" if p["expected"] is None else p["expected"]
        print(
            f"{p['name']:<{width}}  {p['rewrites']:>8}  {expected:>8}  {p['nodes_before']:>12}"
            f"  {p['nodes_after']:>5}  {1e3 * p['seconds']:>6.0f}"
        )
    met = [p for p in data["passes"] if p["expected"] is not None]
    kept = sum(p["rewrites"] >= p["expected"] for p in met)
    print(f"contracts met: {kept} of {len(met)}")
    print("seconds: " + ", ".join(f"{k} {v:.2f}" for k, v in data["seconds"].items()))
    print(
        f"total {data['total_seconds']:.1f} s, peak memory {data['peak_rss_bytes'] / 1e9:.2f} GB, "
        f"artifact {data['artifact_bytes'] / 1e6:.1f} MB"
    )


def run_child(recipe: str, target: str, records: bool) -> dict[str, Any]:
    """Compile in a process of its own."""
    child = [sys.executable, __file__, "--child", "--recipe", recipe, "--target", target]
    child += [] if records else ["--no-records"]
    out = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True).stdout
    data: dict[str, Any] = json.loads(out.splitlines()[-1])
    return data


def compare_records(recipe: str, target: str, repeats: int) -> dict[str, Any]:
    """Compile with and without records in turn; medians, of processor time as well."""
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for _ in range(repeats):
        for records, done in runs.items():
            done.append(run_child(recipe, target, records))
    rows = {
        "with records" if records else "without": {
            "total": statistics.median(run["total_seconds"] for run in done),
            "cpu": statistics.median(run["cpu_seconds"] for run in done),
            "passes": statistics.median(run["seconds"]["passes"] for run in done),
            "emit": statistics.median(run["seconds"]["emit"] for run in done),
            "MB": done[0]["artifact_bytes"] / 1e6,
        }
        for records, done in runs.items()
    }
    print(f"recipe {recipe}, target {target}, medians of {repeats}; seconds")
    print(f"{'':<12}  {'total':>6}  {'cpu':>6}  {'passes':>6}  {'emit':>6}  {'MB':>6}")
    for name, row in rows.items():
        print(f"{name:<12}  " + "  ".join(f"{value:>6.2f}" for value in row.values()))
    for name in ("total", "cpu"):
        first, second = (row[name] for row in rows.values())
        print(f"{name}: {first / second - 1:+.1%}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--records", type=int, metavar="N", help="with and without, N times each")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-records", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        with tempfile.TemporaryDirectory() as folder:
            print(
                json.dumps(
                    compile_once(Path(folder), args.recipe, args.target, not args.no_records)
                )
            )
        return 0
    if args.records:
        data = compare_records(args.recipe, args.target, args.records)
    else:
        data = run_child(args.recipe, args.target, True)
        print(f"python {platform.python_version()}, recipe {args.recipe}, target {args.target}")
        report(data)
    if args.json:
        args.json.write_text(json.dumps(data, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
