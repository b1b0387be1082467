"""The pipeline: every pass, in order, and the levels between them."""

from importlib import import_module

from dsa_compile.ir.passes import Pass
from dsa_compile.ir.program import Level
from dsa_compile.passes.order import ORDER, class_name


def _step(name: str) -> Pass | Level:
    if name.isupper():
        return Level[name]
    module = import_module(f"dsa_compile.passes.{name}")
    made: Pass = getattr(module, class_name(name))()
    return made


PIPELINE = tuple(map(_step, ORDER))
