"""The artifact directory: what a compilation leaves and a runtime loads. No code, no pickle.

::

    artifact/
      manifest.json                    what this is; every other file with its size and SHA-256
      graphs/<region>.json             the graphs, rebuilt over a whitelist of ops
      graphs/<region>.py               the same, to read
      weights/plan.json                how each weight is made from the model's files
      weights/*.safetensors            with ``--weights pack`` only
      passes/NN_<pass>/{before,after}.py
      tokenizer/                       copied from the model directory
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_compile.artifact.manifest import Manifest
    from dsa_compile.artifact.reader import Artifact
    from dsa_compile.artifact.writer import ArtifactWriter

__all__ = ["Artifact", "ArtifactWriter", "Manifest"]

# Imported when asked for: who only reads the manifest and the records does without torch.
_HOMES = {"Artifact": "reader", "ArtifactWriter": "writer", "Manifest": "manifest"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
