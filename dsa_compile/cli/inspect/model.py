"""The artifact whose passes ``verify`` and ``bisect`` run again."""

import argparse
import atexit
import gc
import os
import warnings
from collections.abc import Callable

from dsa_compile.verify.recompiled_artifact import ExportedArtifact, RecompiledArtifact


def _nothing(exported: ExportedArtifact) -> None:
    return None


def open_recompiled(
    args: argparse.Namespace, beside: Callable[[ExportedArtifact], None] = _nothing
) -> RecompiledArtifact:
    """Compile the artifact's model again, as the options say.

    Args:
        args: those of ``verify`` and ``bisect``.
        beside: called with the exported program before the passes run, to start what may run
            beside them.

    Raises:
        UserError: see :meth:`ExportedArtifact.open` and :meth:`ExportedArtifact.recompiled`.
    """
    # standard error is for our own lines: torch and transformers warn of things of no use here
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # What is imported and compiled lives as long as the process: the collector would go through
    # its millions of objects again and again, a sixth of the time.
    # (Back at exit, where extension modules would report what is left as leaks.)
    atexit.register(gc.unfreeze)
    gc.freeze()
    exported = ExportedArtifact.open(
        args.artifact, args.model_dir, args.dummy, args.recorded_export
    )
    gc.freeze()
    beside(exported)
    recompiled = exported.recompiled()
    gc.freeze()
    return recompiled
