"""The wheel and the source distribution: what they hold."""

import os
import re
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from dsa_compile.version import __version__
from tests.installation import ROOT, build, copy_checkout, run

TOP = ("passes", "lowering", "runtime")  # folders that the wheel puts into the package
# Of the repository, beside the package: what its documentation tells readers to run.
SHIPPED = ("benchmarks", "deploy", "docs", "examples", "tests")
SHIPPED_FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "MANIFEST.in", "Makefile", "setup.py")
MODELS = "examples/*/checkpoint/*"  # trained; in the repository alone
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("source") / "checkout")


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
        for path in (source / "dsa_compile").rglob("*.*")
        if path.suffix in (".txt", ".html", ".css", ".js")
    }
    assert data
    assert {*data, "dsa_compile/runtime/ranks/latencies.json"} <= set(wheel.namelist())


@pytest.fixture(scope="module")
def archive(source: Path) -> Path:
    return build(source, "sdist", source.parent / "sdist")


@pytest.fixture(scope="module")
def unpacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    out = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(archive) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # 3.11.4 has it
        file.extractall(out)
    (folder,) = out.iterdir()
    return folder


def test_the_source_distribution_builds_the_same_wheel(
    source: Path, unpacked: Path, wheel: zipfile.ZipFile
) -> None:
    again = zipfile.ZipFile(build(unpacked, "wheel", source.parent / "again"))
    assert sorted(again.namelist()) == sorted(wheel.namelist())


def test_the_source_distribution_holds_what_the_docs_run(source: Path, unpacked: Path) -> None:
    """Tests, docs and examples too, but no trained model."""

    def files(root: Path) -> set[str]:
        return {
            path.relative_to(root).as_posix()
            for folder in (*SHIPPED, *TOP)
            for path in (root / folder).rglob("*")
            if path.is_file()
        }

    models = {path.relative_to(source).as_posix() for path in source.glob(MODELS)}
    assert files(source) - models <= files(unpacked)
    assert not files(unpacked) & models
    assert all((unpacked / name).is_file() for name in SHIPPED_FILES)


def test_the_source_distribution_is_small_and_holds_each_file_once(archive: Path) -> None:
    assert archive.stat().st_size < 6_000_000
    with tarfile.open(archive) as file:
        members = [each for each in file if not each.isdir() and ".egg-info/" not in each.name]
        names = [member.name for member in members]
        assert len(names) == len(set(names))
        assert all(member.isfile() for member in members), "a link"
        texts = [file.extractfile(member).read() for member in members if member.size > 1000]
    assert len(texts) == len(set(texts))


def test_a_copy_without_links_is_a_checkout(source: Path) -> None:
    """As ``git archive`` makes one, or a checkout on a system without symbolic links."""
    assert not [path for path in source.rglob("*") if path.is_symlink()]
    script = "import dsa_compile.passes.pipeline as module; print(module.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(source)}
    args = [sys.executable, "-P", "-c", script]
    assert Path(run(args, source, environment).strip()) == source / "passes" / "pipeline.py"


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
