"""Whether a fused call would get a worse kernel than the calls that it stands for."""

from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from dsa_compile.ir.match import arguments
from dsa_compile.ir.program import Program
from dsa_compile.kernels.facts import facts_of
from dsa_compile.kernels.registry import covered_tokens


def loses_kernels(
    program: Program, fused: OpOverload, args: Sequence[Any], parts: Sequence[fx.Node]
) -> str | None:
    """Reason to leave a call in parts, or None.

    One launch less is worth less than a kernel written for the op: parts that have one are left
    alone where nothing but the fallback takes the fused call.

    Args:
        program: for the target and the providers that the user requested.
        fused: the op of the call that would be made.
        args: its arguments.
        parts: the calls of ops of ours that it would stand for.
    """
    together = _covered(program, fused, args)
    for part in parts:
        assert isinstance(part.target, OpOverload)
        alone = _covered(program, part.target, arguments(part)[1])
        if alone > together:
            beyond = f" beyond {together:.0f} tokens" if together else ""
            return (
                f"nothing but the fallback kernel takes {_name(fused)}{beyond}, "
                f"and {_name(part.target)} has a better one"
            )
    return None


def _covered(program: Program, op: OpOverload, args: Sequence[Any]) -> float:
    config, name = program.config, _name(op)
    asked = dict(text.partition("=")[::2] for text in config.kernels).get(name)
    return covered_tokens(name, config.target, facts_of("", op, args), asked)


def _name(op: OpOverload) -> str:
    return str(op._schema.name).rpartition("::")[2]
