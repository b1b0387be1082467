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

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.writer import ArtifactWriter

__all__ = ["Artifact", "ArtifactWriter", "Manifest"]
