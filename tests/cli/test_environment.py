"""``dsa-compile --check-env``, the time that commands count, and completion in shells."""

import json
import os
import subprocess
import sys
import time

import pytest

from dsa_compile.cli.compile import main
from dsa_compile.cli.environment import environment
from dsa_compile.cli.stopwatch import Stopwatch
from dsa_compile.facts import gpus
from dsa_compile.facts.gpus import Driver, Gpu


def test_what_is_here_as_text_and_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check-env"]) == 0
    text = capsys.readouterr().out
    for name in ("python", "torch", "triton", "deep_gemm", "CUDA driver", "kernel cache", "GPUs"):
        assert f"\n{name}: " in text
    assert "\ntarget cpu:        compile and run\n" in text
    assert "to run: no CUDA driver is installed" in text
    assert main(["--check-env", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["packages"]["torch"].startswith("2.")
    assert data["targets"]["cpu"]["run"]
    assert not data["targets"]["sm_90a"]["run"]
    assert data["default_target"] == {"name": "cpu", "why": "no CUDA GPU is visible here"}


def test_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Driver("13.0", (Gpu("NVIDIA H200", (9, 0)),))
    for where in (gpus, sys.modules["dsa_compile.cli.environment"]):
        monkeypatch.setattr(where, "find_driver", lambda: found)
    data = environment()
    assert data["gpus"] == [{"name": "NVIDIA H200", "capability": "9.0"}]
    assert data["default_target"]["name"] == "sm_90a"
    missing = data["targets"]["sm_100a"]["missing_to_run"]
    assert "no GPU of compute capability 10.0 is visible" in missing
    assert not any("GPU" in text for text in data["targets"]["sm_90a"]["missing_to_run"])


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from dsa_compile.cli.compile import main; main(['--check-env'])\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_the_time_of_a_process_counts_from_its_start() -> None:
    code = (
        "import time; time.sleep(0.5)\n"
        "from dsa_compile.cli.stopwatch import Stopwatch\n"
        "print(Stopwatch(since_start_of_process=True).seconds())"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) <= time.perf_counter() - started + 0.02
    started = time.perf_counter()
    seconds = Stopwatch(since_start_of_process=False).seconds()
    assert seconds <= time.perf_counter() - started


def completions(module: str, line: str) -> list[str]:
    """Completions that a shell is offered at the end of a line."""
    environment = {
        **os.environ,
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": "/dev/stdout",
    }
    code = f"from dsa_compile.cli.{module} import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    return done.stdout.split("\n")


@pytest.mark.parametrize(
    ("module", "line", "offered"),
    [
        ("compile", "dsa-compile m --rec", {"--recipe", "--records"}),
        ("compile", "dsa-compile m --recipe fp8", {"fp8", "fp8-kv-tensor"}),
        ("compile", "dsa-compile m --stop-after absorb", {"absorb_mla"}),
        ("inspect.command", "dsa-inspect a near", {"near-miss"}),
        ("bench", "dsa-bench ker", {"kernels"}),
    ],
)
def test_shells_complete(module: str, line: str, offered: set[str]) -> None:
    pytest.importorskip("argcomplete")
    assert {text.strip() for text in completions(module, line)} - {""} == offered
