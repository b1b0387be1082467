"""The kernel check over Triton's kernels under its interpreter, with one fault after another.

    TRITON_INTERPRET=1 python -m tests.verify.interpreted_kernels ARTIFACT '[[FILE, OLD, NEW]]'

``OLD`` stands once in ``FILE`` of ``kernels/triton`` and is replaced by ``NEW``. Prints, as JSON,
the ops that ran on Triton's kernels, those that are wrong without a fault, and with each of them.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from dsa_compile.kernels.registry import load
from dsa_compile.kernels.table import KERNELS
from dsa_compile.verify.checks import kernel_by_op
from dsa_compile.verify.checks.kernel_check import check_kernels
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from tests.kernels.interpreter import round_as_hardware

TOKENS = 7
OPS = ("rms_norm", "add_rms_norm", "layer_norm", "rope_half", "swiglu_packed", "embedding",
       "write_index_cache", "write_latent_cache", "quantize_blocks", "dense_slots")  # fmt: skip


def planted(file: str, old: str, new: str) -> Any:
    """A module of ``kernels/triton`` with a text replaced."""
    name = f"dsa_compile.kernels.triton.{file}"
    right = importlib.util.find_spec(name)
    assert right is not None
    assert right.origin is not None
    text = Path(right.origin).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{text.count(old)} times"
    path = Path(tempfile.mkdtemp()) / f"{file}.py"  # Triton reads a kernel's source from its file
    path.write_text(text.replace(old, new), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(artifact: str, faults: str) -> None:
    """Check the kernels without and with every fault."""
    round_as_hardware()
    ran: set[str] = set()

    def interpreted(op: str, provider: str, target: str) -> Callable[..., Any] | None:
        known = any(kernel.op == op and kernel.provider == "triton" for kernel in KERNELS)
        if op in OPS and known:
            ran.add(op)
            return load(op, "triton", "sm_90a")
        return load(op, provider, target)

    recompiled = RecompiledArtifact.open(Path(artifact))
    manifest, source = recompiled.artifact.manifest, recompiled.store.source
    program, prompt = recompiled.replay.final, recompiled.prompt(tokens=TOKENS)

    def wrong() -> list[str]:
        found = check_kernels(program, manifest.kernels, manifest.target, source, prompt)
        return sorted({report.op.split(".")[1] for report in found if report.problem})

    with mock.patch.object(kernel_by_op, "load", interpreted):
        healthy = wrong()
        each = []
        for file, old, new in json.loads(faults):
            module = planted(file, old, new)
            with mock.patch.dict(sys.modules, {module.__name__: module}):
                each.append(wrong())
    print(json.dumps([sorted(ran), healthy, each]))


if __name__ == "__main__":
    main(*sys.argv[1:])
