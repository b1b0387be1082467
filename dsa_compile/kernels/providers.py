"""Providers of ops' implementations, and which of them are installed here."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Provider:
    """A source of kernels.

    Args:
        name: as artifacts record it.
        modules: what must be importable.
        install: how to get it.
        peer: made by others; bound only where it is installed or requested.
    """

    name: str
    modules: tuple[str, ...] = ()
    install: str = ""
    peer: bool = False

    def missing(self) -> str | None:
        """Reason why the provider's kernels cannot run in this installation, or None."""
        for module in self.modules:
            if not _importable(module):
                return f"{module} is not installed ({self.install})"
        return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is not there
        return False


_CUDA = "pip install cuda-bindings nvidia-cuda-nvrtc nvidia-cuda-runtime"
PROVIDERS: Mapping[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider("reference"),
        Provider("torch"),
        Provider("triton", ("triton",), "pip install triton"),
        Provider("cuda", ("cuda.bindings",), _CUDA),
        Provider("deep_gemm", ("deep_gemm",), "build it from its repository", peer=True),
        Provider("flash_mla", ("flash_mla",), "build it from its repository", peer=True),
    )
}
"""Providers by name. ``reference`` are the CPU references; ``torch`` those of them that a GPU runs
as well, as several of torch's own kernels."""
