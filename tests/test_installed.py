"""Distributions installed where no checkout is, and tests run from the source distribution."""

import sys
import tarfile
from pathlib import Path

import pytest

from tests.installation import (
    ROOT,
    add_dependencies,
    build,
    copy_checkout,
    offline,
    run,
    site_packages,
)
from tests.server.serving import serving

SCRIPT = (
    "import sys, dsa_compile.runtime, dsa_compile.lowering.stages, dsa_compile.lowering as last\n"
    "assert not {'passes', 'lowering', 'runtime'} & set(sys.modules), 'under a bare name'\n"
    "print(last.__file__)"
)
TOKENS = "tests/runtime/test_special_tokens.py"
NEEDS_A_MODEL = f"{TOKENS}::test_the_ids_before_a_text_are_not_those_behind_it"
NEEDS_NONE = "tests/runtime/test_scheduler.py"


@pytest.mark.slow
def test_the_wheel_compiles_generates_and_serves(tmp_path: Path) -> None:
    """From the source distribution, as pip installs it."""
    source = copy_checkout(tmp_path / "checkout")
    archive = build(source, "sdist", tmp_path / "sdist")
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)], tmp_path)
    add_dependencies(environment)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python")]
    run([*pip, "install", str(archive)], tmp_path, offline())

    def installed(program: str, *words: str | Path) -> str:
        return run([str(environment / "bin" / program), *map(str, words)], tmp_path, offline())

    assert Path(installed("python", "-c", SCRIPT).strip()).is_relative_to(
        site_packages(environment)
    )
    assert installed("dsa-compile", "--version").startswith("dsa-compile ")
    model, artifact = tmp_path / "model", tmp_path / "artifact"
    installed("python", ROOT / "examples" / "small_random.py", model)
    installed("dsa-compile", model, "-o", artifact, "--target", "cpu")
    options = ("--temperature", 0, "--max-tokens", 4)
    assert installed("dsa-generate", artifact, "--prompt-ids", "3 1 4", *options)
    program = [str(environment / "bin" / "dsa-serve")]
    with serving(artifact, program=program, cwd=tmp_path, env=offline()) as server:
        answer = server.post("/v1/completions", prompt=[3, 1, 4], max_tokens=4, temperature=0)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert server.terminate() == 0


@pytest.mark.slow
def test_tests_run_from_the_source_distribution(tmp_path: Path) -> None:
    """Those of a trained model are skipped, and say where it is."""
    archive = build(copy_checkout(tmp_path / "checkout"), "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # 3.11.4 has it
        file.extractall(tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    args = [sys.executable, "-P", "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    printed = run([*args, NEEDS_A_MODEL, NEEDS_NONE], folder, offline(PYTHONPATH=str(folder)))
    assert " skipped" in printed
    assert " passed" in printed
    assert "the repository has the trained model examples/tiny_v32/checkpoint" in printed
