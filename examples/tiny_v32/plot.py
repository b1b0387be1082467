"""Draw a training run: ``python -m examples.tiny_v32.plot --run DIR`` (needs matplotlib)."""

import argparse
import json
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from examples.tiny_v32.choice import EXAMPLES, add_model_argument

_PANELS = (
    ("text", "cross-entropy, nats a token", "natural text and filler"),
    ("answers", "share right", "recall: tokens of answers"),
    ("kl", "nats, sum over layers", "indexer: KL to the attention"),
    ("draft", "share", "MTP: agreement with the model"),
    ("spread", "nats, sum over layers", "attention outside the top-k"),
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_model_argument(parser)
    parser.add_argument("--run", type=Path, help="default: runs/default of the model")
    parser.add_argument("--out", type=Path, help="default: training.png of the model")
    args = parser.parse_args()
    home = EXAMPLES / args.model
    lines = ((args.run or home / "runs" / "default") / "history.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    phases = list(dict.fromkeys(r["phase"] for r in records))
    panels = [panel for panel in _PANELS if any(panel[0] in r for r in records)]
    columns = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(
        2, columns, figsize=(5 * columns, 6), sharex=True, layout="constrained", squeeze=False
    )
    for axis, (key, unit, title) in zip(axes.flat, panels, strict=False):
        for number, phase in enumerate(phases):
            points = [(r["seconds"], r[key]) for r in records if r["phase"] == phase and key in r]
            if points:
                axis.plot(*zip(*points, strict=True), label=phase, color=f"C{number}", lw=1.2)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(unit, fontsize=9)
        axis.set_xlabel("seconds of training", fontsize=9)
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
        if key == "answers":
            axis.set_ylim(0, 1.02)
        if key in ("kl", "spread"):
            axis.set_yscale("log")
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    axes[0, 0].legend(fontsize=8)
    figure.savefig(args.out or home / "training.png", dpi=110)


if __name__ == "__main__":
    main()
