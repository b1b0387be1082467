"""Artifacts in the user's cache: when one is found again, and who compiles it."""

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_compile.artifact.records import Producer
from dsa_compile.errors import ArtifactError, ConfigError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.model_checks import fitting_recipe
from dsa_compile.lowering import cached
from dsa_compile.lowering.cached import cached_artifact
from dsa_compile.lowering.compile_model import decided
from tests.trained import trained_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with small files, and an empty cache."""
    monkeypatch.delenv("DSA_COMPILE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(trained_model() / "config.json", model)
    (model / "model.safetensors").write_bytes(b"weights")
    return model


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where was compiled to; a compilation takes a while and leaves a directory."""
    made: list[Path] = []

    def compile_model(model: str, out: Path, options: CompileConfig, **more: object) -> None:
        made.append(out)
        time.sleep(0.2)
        out.mkdir()

    def open_manifest(path: Path) -> None:
        if not path.exists():
            raise ArtifactError("none")

    monkeypatch.setattr(cached, "open_manifest", open_manifest)
    monkeypatch.setattr(cached, "compile_model", compile_model)
    return made


def test_an_artifact_is_found_again(model: Path, compilations: list[Path]) -> None:
    options = CompileConfig(weights="none")
    first = cached_artifact(str(model), options)
    assert cached_artifact(str(model), options) == first
    assert cached_artifact(f"{model}/../{model.name}", options) == first
    assert compilations == [first]


def _other_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "model.safetensors").write_bytes(b"weighty")


def _another_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}")


def _another_version(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producer, "current", lambda: Producer("dsa-compile", "9", "2", "5"))


def _an_edited_pass(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, edited = cached._home, model.parent / "passes"
    edited.mkdir()
    (edited / "fuse_thing.py").write_text("")
    monkeypatch.setattr(cached, "_home", lambda m: edited if m.endswith(".passes") else home(m))


@pytest.mark.parametrize(
    "change", [_other_weights, _another_file, _another_version, _an_edited_pass]
)
def test_what_an_artifact_depends_on(
    model: Path,
    compilations: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    first = cached_artifact(str(model), CompileConfig(weights="none"))
    change(model, monkeypatch)
    assert cached_artifact(str(model), CompileConfig(weights="none")) != first
    assert len(compilations) == 2


def test_every_option_counts(model: Path, compilations: list[Path]) -> None:
    for options in ({}, {"block_size": 32}, {"disable": ("fuse_add_norm",)}, {"layers": (0, 1)}):
        cached_artifact(str(model), CompileConfig(weights="none", **options))
    assert len(set(compilations)) == 4


def test_two_starts_compile_once(model: Path, compilations: list[Path]) -> None:
    found: list[Path] = []

    def start() -> None:
        found.append(cached_artifact(str(model), CompileConfig(weights="none")))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1
    assert found == compilations * 4


KILLED = """
import sys, time
from pathlib import Path
from dsa_compile.artifact.atomic_directory import AtomicDirectory
from dsa_compile.facts.config import CompileConfig
from dsa_compile.lowering import cached

def compile_model(model, out, options, **more):
    (AtomicDirectory(Path(out), True).path / "half").write_text("half")
    print("half", flush=True)
    time.sleep(600)

cached.compile_model = compile_model
cached.cached_artifact(sys.argv[1], CompileConfig(weights="none", records=False))
"""


@pytest.mark.slow
def test_a_killed_compilation_leaves_nothing_half(model: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(model)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    out = cached_artifact(str(model), CompileConfig(weights="none", records=False))
    assert (out / "manifest.json").is_file()
    names = {path.name for path in out.parent.iterdir() if not path.name.endswith(".lock")}
    assert names == {out.name}


def test_a_cache_that_cannot_be_written(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model / "config.json"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to another place"):
        cached_artifact(str(model), CompileConfig(weights="none"))


@pytest.mark.parametrize(
    ("model_type", "stored", "recipe"),
    [
        ("deepseek_v32", {"quant_method": "fp8"}, "fp8"),
        ("glm_moe_dsa", None, "bf16"),
        ("axk2", {"quant_method": "fp8"}, "bf16"),
    ],
)
def test_the_recipe_that_fits(model_type: str, stored: dict | None, recipe: str) -> None:
    found, why = fitting_recipe({"model_type": model_type, "quantization_config": stored})
    assert found == recipe
    assert why


def test_no_recipe_for_an_unknown_model() -> None:
    with pytest.raises(ConfigError, match="not supported"):
        fitting_recipe({"model_type": "llama"})


def test_a_gpu_gets_the_recipe_of_its_checkpoint() -> None:
    released = ROOT / "examples" / "deepseek_v32"
    found = decided(released, CompileConfig(target="sm_90a"))
    assert found.recipe == "fp8"
    assert "FP8" in found.chosen[-1]
    assert decided(released, CompileConfig(target="sm_90a", recipe="fp32")).recipe == "fp32"
    assert decided(released, CompileConfig(target="cpu")).recipe == "fp32"
