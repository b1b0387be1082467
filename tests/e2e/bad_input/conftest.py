"""A model, its artifacts, and a fixture that runs commands which must be refused.

What goes wrong in a user's hands is one line that says what and where, and nothing half-written.
Here everything passes through the commands themselves; each layer's own tests go through its cases.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_compile.cli import compile as compile_cli
from dsa_compile.cli import generate as generate_cli
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.lowering import stages as compilation
from dsa_compile.passes.manager import run_pipeline
from examples.small_models.models import save_byte_tokenizer, save_hf, tiny_config, tiny_model

PHASE = re.compile(r"[a-z][a-z ]+ \d+\.\d s.*")
"""A phase that came before the refusal, as the progress shows it."""


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded model with a tokenizer: a dense layer and a mixture of experts."""
    path = tmp_path_factory.mktemp("source") / "model"
    config = tiny_config(
        2, first_k_dense_replace=1, n_routed_experts=8, max_position_embeddings=256
    )
    save_hf(tiny_model(config), path, max_shard_size="300KB")
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def kernel(source: Path) -> Any:
    """The model's program after every pass; compiling it again would show nothing new here."""
    program = build_program(source, CompileConfig(block_size=16))
    run_pipeline(program)
    return program


@pytest.fixture
def quick(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``dsa-compile`` takes the finished program, and reads, writes and checks as ever."""
    monkeypatch.setattr(compilation, "build_program", lambda _, config: _finished(kernel, config))
    monkeypatch.setattr(compilation, "run_pipeline", lambda *_: None)


def _finished(kernel: Any, config: CompileConfig) -> Any:
    program = kernel.fork(config)
    program.level, program.records = kernel.level, kernel.records
    return program


@pytest.fixture(scope="session")
def compiled(source: Path, kernel: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two artifacts of the model, ``reference`` and ``pack``."""
    root = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "build_program", lambda _, config: _finished(kernel, config))
        patch.setattr(compilation, "run_pipeline", lambda *_: None)
        for mode in ("reference", "pack"):
            out = str(root / mode)
            command = [str(source), "-o", out, "--weights", mode, "--block-size", "16"]
            assert compile_cli.main([*command, "--quiet"]) == 0
    return root


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(source, tmp_path / "model"))


@pytest.fixture
def artifact(compiled: Path, tmp_path: Path) -> Path:
    """A packed artifact to damage."""
    return Path(shutil.copytree(compiled / "pack", tmp_path / "artifact"))


class Refusal:
    """Runs a command that must be refused and returns what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str], root: Path) -> None:
        self._capsys = capsys
        self.root = root

    def compiling(self, model: Path, *options: str, out: str = "out") -> str:
        before = sorted(self.root.rglob("*"))
        argv = [str(model), "-o", str(self.root / out), *options]
        message = self._refused("dsa-compile", compile_cli.main, argv)
        assert sorted(self.root.rglob("*")) == before, "something is left behind"
        return message

    def generating(self, artifact: Path, *options: str) -> str:
        argv = [str(artifact), *(options or ("--prompt-ids", "5"))]
        return self._refused("dsa-generate", generate_cli.main, argv)

    def _refused(self, program: str, main: Callable[[list[str]], int], argv: list[str]) -> str:
        self._capsys.readouterr()
        assert main(argv) == 2
        said = self._capsys.readouterr().err
        assert said.endswith("\n")
        *progress, message = said.splitlines()
        assert all(PHASE.fullmatch(line) for line in progress), said
        assert message.startswith(f"{program}: error: ")
        return message + "\n"


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refusal:
    return Refusal(capsys, tmp_path)
