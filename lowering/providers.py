"""Which implementation of each kernel op an artifact uses.

A provider is a named set of implementations that the runtime holds; the artifact records the name
chosen for every op, and the runtime refuses what it does not have.
"""

from dsa_compile.errors import CompileError
from dsa_compile.ir.program import Program
from dsa_compile.ops import REFERENCE

# target → providers in order of preference
PREFERENCE: dict[str, tuple[str, ...]] = {"cpu": ("reference",)}
_OPS = {"reference": frozenset(str(op) for op in REFERENCE)}


def bind_kernels(program: Program) -> dict[str, str]:
    """Choose a provider for every ``dsa`` op of a program; op names in alphabetical order.

    Raises:
        CompileError: an op that no provider of the target implements.
    """
    names = {
        str(node.target)
        for region in program.regions.values()
        for node in region.graph.nodes
        if node.op == "call_function" and str(node.target).startswith("dsa.")
    }
    bound = {}
    for name in sorted(names):
        able = [p for p in PREFERENCE[program.config.target] if name in _OPS[p]]
        if not able:
            raise CompileError(
                f"{name}: no provider for target {program.config.target!r} implements it"
            )
        bound[name] = able[0]
    return bound
