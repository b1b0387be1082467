"""What an installation gets: the wheel, the source distribution, and the commands they install."""

import os
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
LINKED = ("passes", "lowering", "runtime")
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
    for name in ("dsa_compile", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(source, "wheel", source.parent / "wheel"))


def modules(root: Path) -> set[str]:
    """Every module of the package, those behind the links as well."""
    return {
        Path(folder, name).relative_to(root).as_posix()
        for folder, _, names in os.walk(root / "dsa_compile", followlinks=True)
        for name in names
        if name.endswith(".py")
    }


def test_the_wheel_holds_every_module_under_one_name(source: Path, wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {name for name in names if name.endswith(".py")} == modules(source)
    for linked in LINKED:
        assert f"dsa_compile/{linked}/__init__.py" in names
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
    assert data <= set(wheel.namelist())


def test_the_source_distribution_builds_the_same_wheel(
    source: Path, wheel: zipfile.ZipFile
) -> None:
    archive = build(source, "sdist", source.parent / "sdist")
    with tarfile.open(archive) as file:
        file.extractall(source.parent / "unpacked", filter="data")
    (unpacked,) = (source.parent / "unpacked").iterdir()
    again = zipfile.ZipFile(build(unpacked, "wheel", source.parent / "again"))
    assert sorted(again.namelist()) == sorted(wheel.namelist())


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
    names = sorted(line.partition(">=")[0] for line in plain)
    assert names == ["numpy", "rich", "safetensors", "torch", "transformers"]


def test_the_commands_exist_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert {"dsa-compile", "dsa-generate"} <= set(PROJECT["scripts"])
    for target in PROJECT["scripts"].values():
        module, function = target.split(":")
        text = wheel.read(module.replace(".", "/") + ".py").decode()
        assert f"\ndef {function}(" in text, target


def test_the_wheel_works_without_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    script = (
        "import sys, dsa_compile.runtime, dsa_compile.compiling\n"
        f"assert not {set(LINKED)} & set(sys.modules), 'imported under a bare name'\n"
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
