"""Declaration of ``dsa::`` ops: schema, CPU reference, types and facts in one call.

Every op returns fresh tensors that are contiguous whatever the strides of its inputs, so a fake
needs to know shapes and dtypes only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.node import has_side_effect

from dsa_compile.ops.facts import FACTS, Family, OpFacts
from dsa_compile.ops.signature import Signature

NAMESPACE = "dsa"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")

REFERENCE: dict[OpOverload, Callable[..., Any]] = {}
"""The plain function behind every op, taking the op's arguments by position.

Calling it saves the dispatcher's share of a call, which at decode sizes is a fair part of the op,
and the check of the operands' types. It works in place on its own temporaries and knows no
autograd: call it with gradients off.
"""

SIGNATURES: dict[OpOverload, Signature] = {}
"""The declared operands and results of ops."""


def define(
    schema: str,
    reference: Callable[..., Any],
    types: str | Callable[..., Any],
    facts: OpFacts,
    *,
    where: Sequence[str] = (),
    any_device: bool = True,
) -> OpOverload:
    """Declare ``dsa::<schema>`` and return its overload.

    Args:
        schema: name, arguments and results, in the dispatcher's schema language.
        reference: the implementation.
        types: of operands and results, from which the fake comes: see
            :mod:`dsa_compile.ops.signature`. Or a fake itself, of results with the right shapes and
            dtypes; sizes may be symbolic, so it must neither branch on them nor turn them into
            ints.
        facts: what is known of it beyond the schema.
        where: conditions on sizes, as text.
        any_device: False for a reference that reads tensors on the host, which would be a silent
            synchronisation on an accelerator; it is then registered for the CPU alone.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    function = reference
    if isinstance(types, str):
        SIGNATURES[overload] = signature = Signature(overload._schema, types, where)
        types, function = signature.fake, signature.checked(reference)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd" if any_device else "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", types, lib=_LIBRARY)
    REFERENCE[overload] = reference
    FACTS[overload] = facts
    return overload


def define_marker(schema: str, function: Callable[..., None]) -> OpOverload:
    """Declare an op that steers execution and computes nothing.

    It is no part of :data:`REFERENCE`, as there is nothing to implement, and it is never dead code.

    Args:
        schema: as in :func:`define`; returns nothing.
        function: does nothing; its docstring says what the op means.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    overload: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    has_side_effect(overload)
    FACTS[overload] = OpFacts(Family.STREAMS)
    return overload


def bad_input(op: str, takes: str) -> ValueError:
    """The error for a call whose types are right but not its values, strides or addresses."""
    return ValueError(f"{NAMESPACE}::{op} takes {takes}")
