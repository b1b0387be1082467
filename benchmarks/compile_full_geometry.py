"""Compile the real DeepSeek-V3.2 geometry without weights and report time and memory by phase.

    python benchmarks/compile_full_geometry.py [--json FILE]

The configuration is the published one: 61 layers, 256 experts, hidden size 7,168, YaRN factor 40.
The compilation runs in a process of its own, so that its peak memory is its own.
"""

import argparse
import json
import platform
import resource
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


def compile_once(folder: Path, recipe: str) -> dict[str, Any]:
    """Compile in this process; seconds from the first import on."""
    started = time.perf_counter()
    from dsa_compile.compiling import compile_model

    imported = time.perf_counter() - started
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    result = compile_model(folder / "model", folder / "artifact", weights="none", recipe=recipe)
    files = [path for path in (folder / "artifact").rglob("*") if path.is_file()]
    return {
        "seconds": {"import": imported, **result.seconds},
        "total_seconds": time.perf_counter() - started,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="bf16")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compile_once(Path(folder), args.recipe)))
        return 0
    child = [sys.executable, __file__, "--child", "--recipe", args.recipe]
    out = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True).stdout
    data = json.loads(out.splitlines()[-1])
    print(f"python {platform.python_version()}, recipe {args.recipe}")
    report(data)
    if args.json:
        args.json.write_text(json.dumps(data, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
