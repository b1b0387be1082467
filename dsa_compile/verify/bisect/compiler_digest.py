"""Digest of what a search compiles with: no trial of an earlier compiler counts as its own."""

import hashlib
import json
from pathlib import Path

import dsa_compile
from dsa_compile import lowering, passes, runtime
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
    # In a checkout the last three lie beside the first, in what is installed within it.
    for package in (dsa_compile, lowering, passes, runtime):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    graphs = [region_to_json(region) for region in final.regions.values()]
    digest.update(json.dumps([graphs, final.weights.to_json()]).encode())
    return digest.hexdigest()
