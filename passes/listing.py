"""The pipeline as a list to read."""

import sys
from collections.abc import Iterator

from dsa_compile.ir.passes import Pass
from dsa_compile.passes.manager import RUNTIME_REQUIRES
from dsa_compile.passes.pipeline import PIPELINE


def listing() -> Iterator[str]:
    """A line for every pass, in order: name, numerics, what it does, who needs it."""
    passes = [step for step in PIPELINE if isinstance(step, Pass)]
    width = max(len(step.name) for step in passes)
    for step in PIPELINE:
        if not isinstance(step, Pass):
            yield f"--- {step.name} ---"
            continue
        text = sys.modules[type(step).__module__].__doc__ or ""
        users = [other.name for other in passes if step.name in other.requires]
        users += ["the runtime"] if step.name in RUNTIME_REQUIRES else []
        needed = f" [needed by {', '.join(users)}]" if users else ""
        first = text.strip().partition("\n")[0]
        yield f"{step.name:<{width}}  {step.numerics.value:<9}  {first}{needed}"
