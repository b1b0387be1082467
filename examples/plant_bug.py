"""Plant a bug in a copy of the compiler, compile a model with it, and let bisect find the rewrite.

    python examples/plant_bug.py MODEL_DIR OUT_DIR

The bug is one line of a pass: a layer's last addition is fused with the model's final norm, not
with the next layer's input norm. Nothing refuses that: names, shapes and types are right, the
tokens wrong. OUT_DIR takes the copy of the compiler (``compiler``), the wrong artifact
(``artifact``) and what ``dsa-inspect bisect`` leaves (``bisect``).
"""

import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASS = "passes/fuse_add_norm_across_layers.py"
RIGHT = 'Load("{next_norm}.weight")'
WRONG = 'Load("model.norm.weight")'


def main(model_dir: Path, out: Path) -> int:
    """Exit status: 0 if the bisection named a rewrite."""
    compiler, artifact = out / "compiler", out / "artifact"
    shutil.rmtree(out, ignore_errors=True)
    for folder in ("dsa_compile", "passes", "lowering", "runtime"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, compiler / folder, symlinks=True, ignore=ignore)
    print(plant(compiler / PASS), flush=True)
    environment = {**os.environ, "PYTHONPATH": str(compiler.resolve())}
    for module, *args in (
        ("compile", model_dir, "-o", artifact, "--target", "cpu", "--quiet"),
        ("inspect", artifact, "bisect", "--against", "reference", "--out", out / "bisect"),
    ):
        shown = " ".join(map(str, (f"dsa-{module}", *args)))
        print(f"+ {shown}", flush=True)
        command = [sys.executable, "-P", "-m", f"dsa_compile.cli.{module}", *map(str, args)]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            return done.returncode
    return 0 if (out / "bisect" / "reproducer").is_dir() else 1


def plant(path: Path) -> str:
    """Put the wrong line into a pass, and give the difference."""
    before = path.read_text(encoding="utf-8")
    if before.count(RIGHT) != 1:
        raise SystemExit(f"{path}: {RIGHT} is not there once; plant another bug")
    after = before.replace(RIGHT, WRONG)
    path.write_text(after, encoding="utf-8")
    sides = (before.splitlines(), after.splitlines())
    return "\n".join(difflib.unified_diff(*sides, PASS, f"{PASS} (planted)", lineterm="", n=1))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python examples/plant_bug.py MODEL_DIR OUT_DIR")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
