"""dsa-compile: a compiler-pass graph optimizer over torch.fx for DeepSeek-V3.2.

``dsa_compile.compile(model, out)`` makes an artifact, ``dsa_compile.runtime.Engine`` runs it.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from dsa_compile.version import __version__

if TYPE_CHECKING:
    from dsa_compile.facts.config import CompileConfig
    from dsa_compile.lowering.compile_model import compile_model as compile
    from dsa_compile.lowering.compile_result import CompileResult

__all__ = ["CompileConfig", "CompileResult", "__version__", "compile"]

# In a checkout passes, lowering and runtime lie beside this folder; once installed they are in it.
if not os.path.isdir(os.path.join(__path__[0], "passes")):
    __path__.append(os.path.dirname(__path__[0]))

# Imported when asked for: a serving process imports this package, and nothing of the compiler.
_HOMES = {
    "compile": ("lowering.compile_model", "compile_model"),
    "CompileResult": ("lowering.compile_result", "CompileResult"),
    "CompileConfig": ("facts.config", "CompileConfig"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, kept = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), kept)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
