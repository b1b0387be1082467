"""dsa-compile: a compiler-pass graph optimizer over torch.fx for DeepSeek-V3.2.

``dsa_compile.compile(model_dir, out)`` makes an artifact, ``dsa_compile.runtime.Engine`` runs it.
"""

from typing import TYPE_CHECKING, Any

from dsa_compile.version import __version__

if TYPE_CHECKING:
    from dsa_compile.compiling import CompileResult

__all__ = ["__version__", "compile"]


def compile(model_dir: str, out: str, **options: Any) -> "CompileResult":
    """Compile a model directory: see :func:`dsa_compile.compiling.compile_model`."""
    # here, and not above: a serving process imports this package and must not load transformers
    from dsa_compile.compiling import compile_model

    return compile_model(model_dir, out, **options)
