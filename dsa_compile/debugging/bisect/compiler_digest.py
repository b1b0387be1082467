"""Digest of what a search compiles with: no trial of an earlier compiler counts as its own."""

import hashlib
import json
import os
from pathlib import Path

import dsa_compile
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.program import Program


def compiler_digest(final: Program) -> str:
    """SHA-256 of this package's source and of a finished program, in hexadecimal digits.

    A bisection runs the passes as they are now, whatever the artifact was compiled with: a pass or
    an op that was mended makes another search. The program stands for passes of other packages.

    Args:
        final: the program behind the last pass.
    """
    digest = hashlib.sha256()
    # os.walk: in a checkout some folders of the package are links
    for folder, _, names in sorted(os.walk(Path(dsa_compile.__file__).parent, followlinks=True)):
        for name in sorted(names):
            if name.endswith(".py"):
                digest.update(Path(folder, name).read_bytes())
    graphs = [region_to_json(region) for region in final.regions.values()]
    digest.update(json.dumps([graphs, final.weights.to_json()]).encode())
    return digest.hexdigest()
