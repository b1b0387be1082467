"""The artifacts of the walk-through in docs/debugging.md: ``python swapped_norm.py GOOD BAD``.

GOOD is compiled by this compiler, BAD by a copy in which ``fuse_add_norm`` takes the two results of
``dsa.add_rms_norm`` the wrong way round.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PASS = "passes/fuse_add_norm.py"
SWAPPED = {
    'edit.take(pair, 1, total, "residual")': 'edit.take(pair, 0, total, "residual")',
    'edit.take(pair, 0, norm, "normed")': 'edit.take(pair, 1, norm, "normed")',
}


def main(good: Path, bad: Path) -> None:
    """Compile both."""
    _compile(ROOT, good)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        plant(copy)
        _compile(copy, bad)


def plant(folder: Path) -> None:
    """Copy the compiler to a folder, with the change."""
    for name in ("dsa_compile", "passes", "lowering", "runtime"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    text = (folder / PASS).read_text(encoding="utf-8")
    for right, wrong in SWAPPED.items():
        assert text.count(right) == 1, f"{PASS} no longer has {right}"
        text = text.replace(right, wrong)
    (folder / PASS).write_text(text, encoding="utf-8")


def _compile(compiler: Path, out: Path) -> None:
    model = ROOT / "examples" / "tiny_v32" / "checkpoint"
    command = [sys.executable, "-P", "-m", "dsa_compile.cli.compile"]
    subprocess.run(
        [*command, model, "-o", out, "--target", "cpu", "--quiet"],
        env={**os.environ, "PYTHONPATH": str(compiler)},
        check=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
