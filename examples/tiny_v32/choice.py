"""Choice of a small model by ``--model``."""

import argparse
import json
from dataclasses import fields
from pathlib import Path

from examples.tiny_glm.config import TinyGlmConfig
from examples.tiny_v32.config import TinyConfig
from examples.tiny_v32_fp8.config import CONFIG as KERNEL_SIZED

EXAMPLES = Path(__file__).parents[1]
DATA = EXAMPLES / "tiny_v32"
"""Directory of the corpus and the held-out text; the models share them, and the tokenizer."""
MODELS: dict[str, TinyConfig] = {
    "tiny_v32": TinyConfig(),
    "tiny_v32_fp8": KERNEL_SIZED,
    "tiny_glm": TinyGlmConfig(),
}


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``; the folder of that name below ``examples`` is where its files go."""
    parser.add_argument("--model", choices=MODELS, default="tiny_v32", help="default: tiny_v32")


def config_of(checkpoint: Path) -> TinyConfig:
    """The geometry that the ``config.json`` of an exported checkpoint states."""
    stated = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    kind = next(
        type(config) for config in MODELS.values() if config.model_type == stated["model_type"]
    )
    return kind(**{f.name: stated[f.name] for f in fields(kind) if f.name in stated})
