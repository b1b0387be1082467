"""Bodies of the ``dsa`` ops of the LOGICAL level in standard ONNX ops.

Each op has a function in ONNX's own notation, in ``bodies.txt``, with the op's name, inputs
and attributes. So an exported graph shows one node a ``dsa`` op, and any runtime of ONNX can run
the body. Bodies are written for clarity: a mask instead of gathered keys, every expert on every
token.

Meaning and rounding are those of the references in :mod:`dsa_compile.ops`. Inputs may have any
leading dimensions where the op allows it. Where an op takes an optional tensor, its function is for
calls without it; but for the router's bias, which ``Gemm`` takes or leaves.
"""

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

import onnx
from onnx import parser

DOMAIN = "dsa"
OPSET = 21
"""Version of ONNX's own ops that exported models use."""


@cache
def bodies() -> dict[str, onnx.FunctionProto]:
    """The function of each op that has one, by the op's name."""
    text = files(__package__).joinpath("bodies.txt").read_text(encoding="utf-8")
    header = f'<opset_import: ["" : {OPSET}, "{DOMAIN}" : 1], domain: "{DOMAIN}">\n'
    parsed = (parser.parse_function(header + one) for one in re.split(r"(?<=\})\n\n", text))
    return {function.name: function for function in parsed}


def needed(calls: Iterable[onnx.NodeProto]) -> list[onnx.FunctionProto]:
    """The functions of the ops that are called, and what these call in turn.

    An op has none if it has no body, or if a call gives a tensor that the body does not take.
    """
    known = bodies()
    inputs: dict[str, int] = {}
    for call in calls:
        inputs[call.op_type] = max(len(call.input), inputs.get(call.op_type, 0))
    todo = [op for op in sorted(inputs.keys() & known.keys()) if inputs[op] <= len(known[op].input)]
    found: dict[str, onnx.FunctionProto] = {}
    while todo:
        name = todo.pop()
        if name not in found:
            found[name] = known[name]
            todo += [node.op_type for node in known[name].node if node.domain == DOMAIN]
    return list(found.values())
