"""What a process must start without; who may import whom is checked by `make lint`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "dsa_compile"
BARE = {"passes", "lowering", "runtime"}


def modules_after(statement: str) -> set[str]:
    """Names in ``sys.modules`` of a fresh interpreter after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_server_starts_without_the_compiler() -> None:
    torch_alone = modules_after("import torch")
    loaded = modules_after("import dsa_compile.runtime") - torch_alone
    forbidden = ("transformers", "torch.export", "torch._export", *(
        f"{PACKAGE}.{name}" for name in ("passes", "lowering", "frontend", "cli")
    ))  # fmt: skip
    found = [name for name in loaded if name.startswith(forbidden)]
    assert not found, sorted(found)
    assert f"{PACKAGE}.runtime" in loaded
    assert not loaded & BARE


def test_conversations_need_no_torch() -> None:
    loaded = modules_after("import dsa_compile.chat")
    found = [
        name for name in loaded if name.partition(".")[0] in ("torch", "transformers", "numpy")
    ]
    assert not found, sorted(found)


def test_http_process_needs_no_torch() -> None:
    loaded = modules_after("import dsa_compile.server.serve, dsa_compile.cli.serve")
    found = [name for name in loaded if name.partition(".")[0] in ("torch", "transformers")]
    assert not found, sorted(found)
    assert "dsa_compile.server.app" in loaded


@pytest.mark.slow
def test_the_compiler_is_loaded_under_one_name() -> None:
    loaded = modules_after("import dsa_compile.lowering.stages, dsa_compile.cli.compile")
    assert {f"{PACKAGE}.passes", f"{PACKAGE}.lowering"} <= loaded
    assert not loaded & BARE
