"""Tests for a GPU are skipped without one, unless they were asked for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import lacks

ROOT = Path(__file__).parent.parent
WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(*args: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args]
    environment = os.environ | {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@WITHOUT
def test_without_a_gpu_they_are_skipped_and_say_why() -> None:
    done = run("-rs", "-m", "gpu", "tests/kernels/test_index_scores.py")
    assert done.returncode == 0, done.stdout
    assert re.search(r"SKIPPED \[4\] .*: needs a GPU\n", done.stdout)


@pytest.mark.slow
@WITHOUT
def test_asked_for_without_a_gpu_they_fail() -> None:
    done = run("-m", "gpu", "--require-gpu", "tests/kernels/test_index_scores.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "these tests need a CUDA GPU, and torch sees none here" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_session_in_which_none_ran_fails(processes: str, tmp_path: Path) -> None:
    """As on a GPU of another generation; a process of several may have none to run."""
    (tmp_path / "conftest.py").write_text(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "torch.cuda.device_count = lambda: 1\n"
        "torch.cuda.get_device_capability = lambda: (8, 0)\n"
        "from tests.conftest import *\n"
    )
    (tmp_path / "test_one.py").write_text(
        "import pytest\n\n@pytest.mark.gpu(least=(9, 0))\ndef test_one(): ...\n\n"
        "@pytest.mark.gpu\ndef test_two(): ...\n"
    )
    options = ["--require-gpu", "-rs", f"-n{processes}", "--dist=loadfile"]
    options += ["-c", str(ROOT / "pyproject.toml"), f"--rootdir={tmp_path}"]
    done = run(*options, f"{tmp_path}/test_one.py::test_one")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "no test ran: none of them takes this GPU" in done.stdout
    assert "needs a GPU of compute capability 9.0 or above, this one has 8.0" in done.stdout
    done = run(*options, f"{tmp_path}/test_one.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_a_machine_lacks() -> None:
    assert lacks(None) == "needs a GPU"
    assert lacks(None, least=(9, 0)) == "needs a GPU"
    assert lacks((9, 0)) is None
    assert lacks((9, 0), capability=(9, 0)) is None
    assert lacks((10, 0), least=(9, 0)) is None
    assert lacks((10, 0), capability=(9, 0)) == (
        "needs a GPU of compute capability 9.0, this one has 10.0"
    )
    assert lacks((9, 0), count=2) == "needs 2 GPUs"
    assert lacks((9, 0), 2, count=2) is None


def test_no_test_skips_by_itself() -> None:
    """Else it would be neither among those of ``make test-gpu`` nor told from other skips."""
    pattern = re.compile(r"skipif\(\s*not torch\.cuda")
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert not [str(path) for path in files if pattern.search(path.read_text(encoding="utf-8"))]


@pytest.mark.slow
def test_they_are_found_without_what_only_others_need(tmp_path: Path) -> None:
    """A machine with a GPU may have no browser to drive, no ONNX and nothing to plot with."""
    absent = dict.fromkeys(("playwright", "onnx", "onnxruntime", "matplotlib"))
    (tmp_path / "absent.py").write_text(f"import sys\n\nsys.modules.update({absent})\n")
    options = ("-p", "absent", "--collect-only", "-m", "gpu")
    done = run(*options, "tests", path=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "tests/kernels/test_topk.py" in done.stdout
