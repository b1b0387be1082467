"""Machine, driver, versions, peers and command of a run."""

import importlib.util
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

PEERS = ("deep_gemm", "flash_mla", "flashinfer", "vllm")
"""Modules of others whose kernels the suites time beside ours."""


def machine() -> dict[str, str]:
    """GPU or CPU, driver, day and the versions that decide the figures, those of peers too."""
    if torch.cuda.is_available():
        found = {"gpu": torch.cuda.get_device_name()}
    else:
        found = {"cpu": platform.processor() or platform.machine()}
    if driver := _driver():
        found["driver"] = driver
    found |= {"date": date.today().isoformat(), "python": platform.python_version()}
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda or "-"}
    for package in ("triton", "cuda-bindings"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | peers()


def peers() -> dict[str, str]:
    """Peers of :data:`PEERS` that can be imported, each with its version.

    A module that a distribution of another name brings has that name before the version.
    """
    return {name: _version(name) for name in PEERS if importlib.util.find_spec(name)}


def command(argv: Sequence[str] | None = None) -> str:
    """The command that runs, absolute paths as bare file names.

    Args:
        argv: program and arguments; None takes this process's.
    """
    program, *words = sys.argv if argv is None else argv
    shown = [Path(word).name if word.startswith("/") else word for word in words]
    name = Path(program).name
    return shlex.join(["dsa-bench" if name == "bench.py" else name, *shown])


def _version(module: str) -> str:
    for name in _distributions().get(module, ()):
        version = metadata.version(name)
        return version if name.startswith(module) else f"{name} {version}"
    return "unversioned"  # importable from a folder


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


def _driver() -> str:
    """Version of the GPU's driver; empty if nvidia-smi does not tell it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return told.stdout.partition("\n")[0].strip()
