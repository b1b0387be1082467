"""A chain of elementwise calls as one op, which a GPU's compiler makes one kernel of.

The chain is data, and readable: a JSON object with the number of inputs, the calls (each the name
of an op of :data:`CALLS` and its arguments) and the results. Values are numbered, ``"%0"`` and on:
the inputs, then what each call returns. ``"torch.float32"`` is a dtype, all else itself::

    {"inputs": 2, "calls": [["aten.mul.Tensor", ["%0", "%1"]], ["aten.silu.default", ["%2"]]],
     "results": ["%3"]}
"""

import functools
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.ops.facts import Family, OpFacts
from dsa_compile.ops.library import bad_input, define
from dsa_compile.ops.mlp import swiglu
from dsa_compile.ops.rope import rope_half, rope_interleaved

aten = torch.ops.aten

_OVERLOADS = (
    aten.add.Tensor,
    aten.cat.default,
    aten.clamp.default,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.neg.default,
    aten.pow.Tensor_Scalar,
    aten.relu.default,
    aten.rsqrt.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.sub.Tensor,
    aten.to.dtype,
    aten.unsqueeze.default,
    aten.view.default,
)
CALLS: dict[str, Callable[..., Any]] = {
    **{str(overload): overload for overload in _OVERLOADS},
    "dsa.rope_half.default": rope_half,
    "dsa.rope_interleaved.default": rope_interleaved,
    "dsa.swiglu.default": swiglu,
    "getitem": operator.getitem,
}
"""Functions that a chain may call, by name."""

_MOST = 1000  # inputs, and calls; a layer has less


def pointwise(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    """Run a chain.

    Args:
        inputs: any shapes and dtypes that its calls take.
        program: see the module's text.

    Returns:
        Its results.

    Raises:
        ValueError: the program is not one.
    """
    return list(chain(program)(*inputs))


@functools.cache
def chain(program: str) -> Callable[..., tuple[Tensor, ...]]:
    """A program as a straight-line function of its inputs.

    Raises:
        ValueError: it is not one.
    """
    try:
        return _build(json.loads(program))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise bad_input("pointwise", f"a program of known calls, not {program!r:.120}") from error


def _build(program: Any) -> Callable[..., tuple[Tensor, ...]]:
    if not 0 < program["inputs"] <= _MOST or len(program["calls"]) > _MOST:
        raise ValueError(f"more than {_MOST} inputs or calls")
    graph = fx.Graph()
    values = [graph.placeholder(f"x{index}") for index in range(program["inputs"])]
    for name, args in program["calls"]:
        node = graph.call_function(CALLS[name], tuple(_decode(arg, values) for arg in args))
        values.append(node)
    graph.output(tuple(_decode(result, values) for result in program["results"]))
    forward: Callable[..., tuple[Tensor, ...]] = fx.GraphModule(torch.nn.Module(), graph).forward
    return forward


def _decode(argument: Any, values: Sequence[fx.Node]) -> Any:
    match argument:
        case list():
            return [_decode(entry, values) for entry in argument]
        case str() if argument[:1] == "%" and argument[1:].isdecimal():
            return values[int(argument[1:])]
        case str():
            dtype = getattr(torch, argument.removeprefix("torch."))
            if not isinstance(dtype, torch.dtype):
                raise ValueError(argument)
            return dtype
    return argument


def _pointwise_fake(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    return [torch.empty_like(made) for made in chain(program)(*inputs)]


POINTWISE = define(
    "pointwise(Tensor[] inputs, str program) -> Tensor[]",
    pointwise,
    _pointwise_fake,
    OpFacts(Family.POINTWISE),
)
