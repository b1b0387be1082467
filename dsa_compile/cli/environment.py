"""``--check-env``: versions, GPUs, and what can be compiled and run here."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from dsa_compile.cli.tables import print_json
from dsa_compile.errors import UserError
from dsa_compile.facts.config import TARGETS
from dsa_compile.facts.gpus import CAPABILITIES, Driver, choose_target, find_driver
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "numpy",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
)
_NEEDED = ("torch", "transformers", "safetensors", "numpy", "huggingface_hub")


def show_environment(as_json: bool) -> int:
    """Print the environment; returns the exit status."""
    found = environment()
    if as_json:
        print_json(found)
    else:
        for line in _lines(found):
            print(line)
    return 0


def environment() -> dict[str, Any]:
    """Environment: packages and GPUs; nothing heavy is imported, and no GPU memory is taken.

    Returns:
        JSON-ready. ``targets`` has for each target whether it can be compiled for and run here, and
        what is missing for either.
    """
    driver = find_driver()
    try:
        chosen, why = choose_target()
    except UserError as error:
        chosen, why = None, str(error)
    return {
        "dsa_compile": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "peers": {
            name: _version(name) if provider.missing() is None else None
            for name, provider in PROVIDERS.items()
            if provider.peer
        },
        "cuda_driver": driver.version,
        "gpus": [
            {"name": gpu.name, "capability": ".".join(map(str, gpu.capability))}
            for gpu in driver.gpus
        ],
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "kernel_cache": _kernel_cache(),
        "hub_cache": _hub_cache(),
        "default_target": {"name": chosen, "why": why},
        "targets": {name: _target(name, driver) for name in TARGETS},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        module = package.replace("-", "_")
        return "unknown version" if _importable(module) else None


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _kernel_cache() -> str:
    from dsa_compile.kernels.cuda.compiler import cache_dir

    return str(cache_dir())


def _hub_cache() -> str:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface"
    return os.environ.get("HF_HUB_CACHE") or str(Path(home) / "hub")


def _target(name: str, driver: Driver) -> dict[str, Any]:
    absent = [package for package in _NEEDED if _version(package) is None]
    compiling = [f"{package} is not installed" for package in absent]
    running = list(compiling)
    if name in CAPABILITIES:
        shipping = [_needs(provider) for provider in ("triton", "cuda")]
        running += [problem for problem in shipping if problem]
        if _version("nvidia-cuda-nvrtc") is None:
            running.append("nvidia-cuda-nvrtc is not installed")
        if driver.version is None:
            running.append("no CUDA driver is installed")
        elif not any(gpu.target == name for gpu in driver.gpus):
            major, minor = CAPABILITIES[name]
            running.append(f"no GPU of compute capability {major}.{minor} is visible")
    return {
        "compile": not compiling,
        "run": not running,
        "missing_to_compile": compiling,
        "missing_to_run": running,
    }


def _needs(provider: str) -> str | None:
    return PROVIDERS[provider].missing()


def _lines(found: dict[str, Any]) -> Iterator[str]:
    def row(name: str, text: object) -> str:
        return f"{name + ':' if name else '':<19}{text}"

    yield row("dsa-compile", found["dsa_compile"])
    yield row("python", f"{found['python']} on {found['platform']}")
    for name, version in (found["packages"] | found["peers"]).items():
        yield row(name, version or "not installed")
    yield row("CUDA driver", f"for CUDA {found['cuda_driver']}" if found["cuda_driver"] else "none")
    gpus = [f"{gpu['name']} (compute capability {gpu['capability']})" for gpu in found["gpus"]]
    for index, text in enumerate(gpus or ["none is visible"]):
        yield row(f"GPU {index}" if gpus else "GPUs", text)
    if found["cuda_visible_devices"] is not None:
        yield row("visible", f"CUDA_VISIBLE_DEVICES={found['cuda_visible_devices']}")
    yield row("kernel cache", found["kernel_cache"])
    yield row("Hub cache", found["hub_cache"])
    for name, target in found["targets"].items():
        can = [verb for verb in ("compile", "run") if target[verb]]
        yield row(f"target {name}", f"{' and '.join(can) or 'cannot be compiled'}")
        for problem in target["missing_to_run"]:
            yield row("", f"to run: {problem}")
    default = found["default_target"]
    yield row("default target", f"{default['name'] or 'none'} ({default['why']})")
