"""Distributions built of a copy of the checkout, and environments to install them into, offline."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copy_checkout(target: Path) -> Path:
    """A copy to build in: building in place would leave files that later go in.

    What ``deploy/Dockerfile.dockerignore`` names stays behind.
    """
    patterns = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().split()
    anywhere = [each.removeprefix("**/") for each in patterns if each.startswith("**/")]

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = anywhere + (patterns if Path(folder) == ROOT else [])
        return shutil.ignore_patterns(*here)(folder, names)

    shutil.copytree(ROOT, target, ignore=ignored)
    return target


def build(source: Path, kind: str, out: Path) -> Path:
    """Build a ``wheel`` or an ``sdist`` of ``source`` with the installed setuptools, offline."""
    out.mkdir()
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    run([sys.executable, "-c", script], cwd=source)
    (made,) = out.iterdir()
    return made


def run(command: list[str], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def offline(**more: str) -> dict[str, str]:
    """Environment variables: no checkout on Python's path, and pip asks no index."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # 0 is how pip is told by a variable to build with the setuptools that is there
    pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return {**kept, **pip, **more}


def add_dependencies(environment: Path) -> None:
    """Let a virtual environment see this one's packages, all but the project itself."""
    seen = environment / "dependencies"
    seen.mkdir()
    for site in filter(os.path.isdir, sys.path):
        if Path(site).name != "site-packages":
            continue
        for entry in Path(site).iterdir():
            left = "dsa_compile" in entry.name or entry.suffix == ".pth"
            if not left and not (seen / entry.name).exists():
                (seen / entry.name).symlink_to(entry)
    own = site_packages(environment)
    for bundled in own.glob("setuptools*"):  # Python 3.11's is too old for torch
        shutil.rmtree(bundled)
    (own / "dependencies.pth").write_text(f"{seen}\n")


def site_packages(environment: Path) -> Path:
    """The folder that packages are installed into."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
