"""Installation: the wheel, the source distribution, and the commands they install."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from dsa_compile.version import __version__

ROOT = Path(__file__).resolve().parents[1]
TOP = ("passes", "lowering", "runtime")  # folders that the wheel puts into the package
# Of the repository, beside the package: what its documentation tells readers to run.
SHIPPED = ("benchmarks", "deploy", "docs", "examples", "tests")
SHIPPED_FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in", "Makefile", "setup.py")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(source: Path, kind: str, out: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` of ``source`` with the installed setuptools, offline."""
    out.mkdir()
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=source, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build in: building in place would leave files that later go in."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    copy.mkdir()
    for name in ("dsa_compile", *TOP, *SHIPPED):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"], *SHIPPED_FILES):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(source, "wheel", source.parent / "wheel"))


def modules(root: Path) -> set[str]:
    """Every module of the package as a wheel names it."""
    places = {root / "dsa_compile": "dsa_compile"}
    places |= {root / name: f"dsa_compile/{name}" for name in TOP}
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for folder, prefix in places.items()
        for path in folder.rglob("*.py")
    }


def test_the_wheel_holds_every_module_under_one_name(source: Path, wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name for name in names if name.endswith(".py")} == modules(source)
    for name in TOP:
        assert f"dsa_compile/{name}/__init__.py" in names
    assert "dsa_compile/py.typed" in names
    packages = {name.partition("/")[0] for name in names}
    assert packages == {"dsa_compile", f"dsa_compile-{__version__}.dist-info"}


def test_the_wheel_holds_what_modules_read(source: Path, wheel: zipfile.ZipFile) -> None:
    data = {
        path.relative_to(source).as_posix()
        for path in (source / "dsa_compile" / "inspecting").rglob("*.*")
        if path.suffix in (".txt", ".html", ".css", ".js")
    }
    assert data
    assert {*data, "dsa_compile/runtime/ranks/latencies.json"} <= set(wheel.namelist())


@pytest.fixture(scope="module")
def unpacked(source: Path) -> Path:
    """The source distribution, unpacked."""
    archive = build(source, "sdist", source.parent / "sdist")
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # 3.11.4 has it
        file.extractall(source.parent / "unpacked")
    (folder,) = (source.parent / "unpacked").iterdir()
    return folder


def test_the_source_distribution_builds_the_same_wheel(
    source: Path, unpacked: Path, wheel: zipfile.ZipFile
) -> None:
    again = zipfile.ZipFile(build(unpacked, "wheel", source.parent / "again"))
    assert sorted(again.namelist()) == sorted(wheel.namelist())


def test_the_source_distribution_holds_what_the_docs_run(source: Path, unpacked: Path) -> None:
    def files(root: Path) -> set[str]:
        return {
            path.relative_to(root).as_posix()
            for folder in (*SHIPPED, *TOP)
            for path in (root / folder).rglob("*")
            if path.is_file()
        }

    assert files(source) <= files(unpacked)
    assert all((unpacked / name).is_file() for name in SHIPPED_FILES)


def test_the_source_distribution_holds_each_file_once(unpacked: Path) -> None:
    assert not (unpacked / "dsa_compile" / "passes").exists()
    assert (unpacked / "passes" / "pipeline.py").is_file()


def test_a_copy_without_links_is_a_checkout(source: Path) -> None:
    """As ``git archive`` makes one, or a checkout on a system without symbolic links."""
    assert not [path for path in source.rglob("*") if path.is_symlink()]
    script = "import dsa_compile.passes.pipeline as module; print(module.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    args = [sys.executable, "-P", "-c", script]
    done = subprocess.run(args, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == source / "passes" / "pipeline.py"


def test_no_message_names_a_package_that_no_index_has() -> None:
    """The project is not published: what users shall install are packages that are."""
    sources = [path for name in ("dsa_compile", *TOP) for path in (ROOT / name).rglob("*.py")]
    assert not [path for path in sources if "dsa-compile[" in path.read_text(encoding="utf-8")]


def test_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"dsa_compile-{__version__}.dist-info"
    metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert metadata["Name"] == "dsa-compile"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    extras = metadata.get_all("Provides-Extra") or []
    assert {"cuda", "serve", "dev"} <= set(extras)
    plain = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    # what every user installs; anything more belongs into an extra
    names = sorted(re.split("[<>=]", line)[0] for line in plain)
    assert names == ["huggingface_hub", "numpy", "rich", "safetensors", "torch", "transformers"]


def test_the_commands_exist_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert {"dsa-compile", "dsa-generate"} <= set(PROJECT["scripts"])
    for target in PROJECT["scripts"].values():
        module, function = target.split(":")
        text = wheel.read(module.replace(".", "/") + ".py").decode()
        assert f"\ndef {function}(" in text, target


def test_the_wheel_works_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    script = (
        "import sys, dsa_compile.runtime, dsa_compile.lowering.stages\n"
        f"assert not {set(TOP)} & set(sys.modules), 'imported under a bare name'\n"
        "print(dsa_compile.runtime.__file__, dsa_compile.lowering.__file__, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.split():
        assert Path(line).is_relative_to(tmp_path / "site")
