"""Compile two layers of a model in every recipe for every target: MODEL_DIR OUT_DIR.

A process of its own, so that Python's hashes differ from those of another.
"""

import sys
from pathlib import Path

from tests.exports import keep_exports

keep_exports()  # before the compiler takes what is wrapped

from dsa_compile.facts.config import TARGETS  # noqa: E402
from dsa_compile.facts.formats import RECIPES  # noqa: E402
from dsa_compile.lowering.compile_model import compile_model  # noqa: E402

CASES = [(target, recipe) for target in TARGETS for recipe in RECIPES]


def compile_case(
    model_dir: Path, out: Path, target: str, recipe: str, records: bool = True
) -> Path:
    """The last dense layer and the first with experts; kernels are not compiled to machine code."""
    artifact = out / f"{target}-{recipe}"
    options = {
        "weights": "none",
        "layers": (2, 3),
        "compiled_kernels": False,
        "records": records,
    }
    compile_model(model_dir, artifact, target=target, recipe=recipe, **options)
    return artifact


def main(model_dir: Path, out: Path) -> None:
    for target, recipe in CASES:
        compile_case(model_dir, out, target, recipe)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
