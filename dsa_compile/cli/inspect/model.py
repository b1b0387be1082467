"""The artifact whose passes ``verify`` and ``bisect`` run again."""

import argparse
import atexit
import gc
import os
import warnings

from dsa_compile.debugging.recompiled_artifact import RecompiledArtifact


def open_recompiled(args: argparse.Namespace) -> RecompiledArtifact:
    """Compile the artifact's model again, as the options say; see
    :meth:`RecompiledArtifact.open`."""
    # standard error is for our own lines: torch and transformers warn of things of no use here
    warnings.simplefilter("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # What is imported and compiled lives as long as the process: the collector would go through
    # its millions of objects again and again, a sixth of the time.
    # (Back at exit, where extension modules would report what is left as leaks.)
    atexit.register(gc.unfreeze)
    gc.freeze()
    recompiled = RecompiledArtifact.open(
        args.artifact, args.model_dir, args.dummy, args.recorded_export
    )
    gc.freeze()
    return recompiled
