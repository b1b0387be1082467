"""``verify`` of healthy models: whatever it accuses is a fault of its own.

    python -m tests.verify.healthy_grid [--recipes fp8] [--models random] [--seed 0 --first 30]

Recipes × models × targets × lengths of prompts, each in a process of its own; a line each, with
what was accused. The models are two layers of the trained one and of its FP8 copy with scales that
are powers of two, and three random geometries, of which the wide one is made for GPUs. A model that
a target does not take is refused, and no prompt is longer than the model takes. The longest have
the passes that round checked alone, for a cell to take about a minute. Exits with 1 if anything was
accused.

``--models released`` is one expert layer of DeepSeek-V3.2 at its real size, with weights made as
they are read (``verify --dummy``); a cell takes minutes, and so it has to be named.

``--layouts`` cuts the models over ranks. Two ranks share ``random-blocks`` in FP8.

With ``--out`` each cell is kept in a JSON file as soon as it is done, and those that are there are
not run again, so that the grid can be run a part at a time; remove the file after a change.
``--seed`` puts the cells in a random order that takes models and recipes in turn, of which
``--first`` runs the beginning; ``--workers`` runs several at once.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from tests.parallel.whole_blocks import save_whole_blocks
from tests.trained import trained_model

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ("fp32", "bf16", "fp8", "fp8-kv-tensor")
MODELS = ("trained", "trained-fp8", "random", "random-wide-values", "random-wide")
ON_RANKS = "random-blocks"
RELEASED = "released"
LAYERS = {"trained": "1-2", "trained-fp8": "1-2", "random-wide": "1-2", RELEASED: "3"}
TARGETS = ("cpu", "sm_90a")
TOKENS = (99, 512, 2500)
LAYOUTS = {
    "one": (),
    "tp2": ("--tp", "2"),
    "tp2ep2": ("--tp", "2", "--ep", "2"),
    "dp2": ("--dp", "2"),
    "dp2ep2": ("--dp", "2", "--ep", "2"),
    "tp2dp2ep4": ("--tp", "2", "--dp", "2", "--ep", "4", "--shard-embedding"),
}
ROUNDING = ("absorb_mla", "quantize_projections", "quantize_experts", "quantize_indexer",
            "fuse_norm_quantize", "insert_paged_caches", "fuse_attention_expand")  # fmt: skip


def make_model(name: str, folder: Path) -> Path:
    """The directory of a model, made in ``folder`` if it is not among the examples."""
    if name == "trained":
        return trained_model()
    if name == RELEASED:
        return EXAMPLES / "deepseek_v32"
    path = folder / name
    if path.is_dir():
        return path
    if name == "trained-fp8":
        trained_model()
        command = [sys.executable, "-m", "examples.tiny_v32.quantize_fp8", "--out", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        return path
    if name == "random-wide":
        return _wide_model(path)
    if name == ON_RANKS:
        save_whole_blocks(path)
        return path
    from examples.small_models.models import save_hf, tiny_config, tiny_model

    wide = {"v_head_dim": 128, "qk_nope_head_dim": 32} if name == "random-wide-values" else {}
    path.mkdir()
    save_hf(tiny_model(tiny_config(2, first_k_dense_replace=1, **wide)), path)
    return path


def _wide_model(path: Path) -> Path:
    """The geometry of ``examples/tiny_v32_fp8``, in FP8 blocks."""
    from examples.tiny_v32.export import write_checkpoint
    from examples.tiny_v32.model import TinyModel
    from examples.tiny_v32.quantize_fp8 import quantize_checkpoint
    from examples.tiny_v32_fp8.config import CONFIG

    model = TinyModel(CONFIG)
    model.initialise(0)
    plain = path.with_name(f"{path.name}-bf16")
    write_checkpoint(model, trained_model(), plain)
    quantize_checkpoint(plain, path)
    return path


class RefusedError(Exception):
    """The model cannot be compiled so."""


def accusations(
    model: Path, recipe: str, target: str, tokens: int, layers: str | None, layout: str = "one"
) -> Iterator[str]:
    """Problems that ``verify`` finds in a model as this installation compiles it."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    count = min(tokens, config["max_position_embeddings"])
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "artifact"
        cut = [*LAYOUTS[layout], *([] if layers is None else ["--layers", layers])]
        dummy = not list(model.glob("*.safetensors"))
        if dummy:
            cut += ["--weights", "none"]
        done = _run("compile", model, "-o", path, "--recipe", recipe, "--target", target, *cut)
        if done.returncode:
            raise RefusedError(done.stderr.strip().splitlines()[-1])
        only = [f"--pass={p}" for p in ROUNDING if p in _passes(path)] if tokens > 1000 else []
        verify = ["inspect", path, "verify", "--json", "--tokens", count]
        if dummy:
            verify += ["--dummy", "--model-dir", model]
        done = _run(*verify, *only)
        if done.returncode not in (0, 1):
            yield done.stderr.strip().splitlines()[-1]
            return
        report = json.loads(done.stdout)
        for run in report["passes"]:
            if run["problem"]:
                yield f"{run['name']}: {run['problem']}"
        for hazard in report["hazards"]:
            yield f"{hazard['pass_name']}: {hazard['problem']}"
        yield from report["emission"]


def _run(command: str, *args: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", f"dsa_compile.cli.{command}", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def _passes(artifact: Path) -> set[str]:
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    return {record["name"] for record in manifest["passes"]}


Cell = tuple[str, str, str, int, str]
"""Model, recipe, target, tokens, layout."""


def in_turn(cells: Iterable[Cell], seed: int) -> list[Cell]:
    """Cells in a random order of which every beginning has models and recipes in proportion."""
    chance, groups = random.Random(seed), defaultdict(list)
    for cell in cells:
        groups[cell[:2]].append(cell)
    for group in groups.values():
        chance.shuffle(group)
    turns = [[cell for cell in turn if cell] for turn in itertools.zip_longest(*groups.values())]
    for turn in turns:
        chance.shuffle(turn)
    return [cell for turn in turns for cell in turn]


def main() -> int:
    """Run the grid and print it."""
    parser = argparse.ArgumentParser(description="verify of healthy models")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument(
        "--models", nargs="+", default=MODELS, choices=(*MODELS, ON_RANKS, RELEASED)
    )
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--layouts", nargs="+", default=("one",), choices=LAYOUTS)
    parser.add_argument("--seed", type=int, help="of a random order")
    parser.add_argument("--first", type=int, help="run so many cells")
    parser.add_argument("--out", type=Path, help="JSON file of cells, read and added to")
    parser.add_argument("--workers", type=int, default=1, help="cells run at once")
    args = parser.parse_args()
    kept = _kept(args.out)
    cells = list(
        itertools.product(args.models, args.recipes, args.targets, args.tokens, args.layouts)
    )
    if args.seed is not None:
        cells = in_turn(cells, args.seed)
    cells = cells[: args.first]
    left = [cell for cell in cells if _key(cell) not in kept]
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.workers) as pool:
        paths = {model: make_model(model, Path(name)) for model, *_ in left}
        running = {pool.submit(run_cell, cell, paths[cell[0]]): cell for cell in left}
        for done in as_completed(running):
            cell, (found, seconds) = running[done], done.result()
            model, recipe, target, tokens, layout = cell
            _keep(args.out, kept, _key(cell), found)
            shown = f"{model:20} {recipe:14} {target:7} {tokens:5} {layout:10} {seconds:6.0f} s"
            print(f"{shown} {found}"[:180], flush=True)
    accused = sum(not kept[_key(cell)].startswith(("right", "refused")) for cell in cells)
    print(f"{accused} accused")
    return 1 if accused else 0


def run_cell(cell: Cell, path: Path) -> tuple[str, float]:
    """Accusations in a cell, ``right`` if there are none, or why it is refused; and its seconds.

    Args:
        cell: which.
        path: directory of its model.
    """
    model, recipe, target, tokens, layout = cell
    began = time.perf_counter()
    layers = LAYERS.get(model)
    try:
        found = "; ".join(accusations(path, recipe, target, tokens, layers, layout)) or "right"
    except RefusedError as refused:
        found = f"refused: {refused}"
    return found, time.perf_counter() - began


def _key(cell: Cell) -> str:
    return " ".join(map(str, cell))


def _kept(path: Path | None) -> dict[str, str]:
    """The cells of a file: right, refused and why, or what was accused."""
    if path is None or not path.exists():
        return {}
    cells: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return cells


def _keep(path: Path | None, kept: dict[str, str], key: str, found: str) -> None:
    kept[key] = found
    if path is not None:
        path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
