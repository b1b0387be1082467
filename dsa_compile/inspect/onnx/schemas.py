"""The ops of exported graphs as ONNX operators: their schemas, derived from torch's.

A tensor argument is an input; a number or a dtype (as ONNX numbers it) is an attribute. ONNX
changes nothing in place, so an op that writes a cache has the written cache as its last result.

Ops of other domains (``aten`` and ``transformers``, before the LOGICAL level) take any tensors; the
attribute ``call`` is the whole call, to read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx
from onnx.defs import OpSchema
from torch._ops import OpOverload

from dsa_compile.inspect.onnx.bodies import DOMAIN
from dsa_compile.inspect.onnx.body import DTYPES
from dsa_compile.ops import REFERENCE

VERSION = 1
"""Version of every domain but ONNX's own."""

_ANY = [f"tensor({onnx.TensorProto.DataType.Name(number).lower()})" for number in DTYPES.values()]
_ATTRIBUTES: Mapping[str, OpSchema.AttrType] = {
    "int": OpSchema.AttrType.INT,
    "bool": OpSchema.AttrType.INT,
    "ScalarType": OpSchema.AttrType.INT,
    "float": OpSchema.AttrType.FLOAT,
    "str": OpSchema.AttrType.STRING,
}
_OPTION = OpSchema.FormalParameterOption


@dataclass(frozen=True)
class Signature:
    """Signature of a ``dsa`` op in ONNX.

    Attributes:
        inputs: names of tensor arguments, in order.
        attributes: names of the others.
        results: names of what it returns.
        written: names of the inputs that it changes; each is a result too, after ``results``.
        overload: the op.
    """

    inputs: tuple[str, ...]
    attributes: tuple[str, ...]
    results: tuple[str, ...]
    written: tuple[str, ...]
    overload: OpOverload


@cache
def signatures() -> Mapping[str, Signature]:
    """Signatures of all ``dsa`` ops that compute, by their names."""
    return {str(op).split(".")[1]: _signature(op) for op in REFERENCE}


def _signature(op: OpOverload) -> Signature:
    arguments = op._schema.arguments
    tensors = [argument for argument in arguments if "Tensor" in str(argument.type)]
    return Signature(
        inputs=tuple(argument.name for argument in tensors),
        attributes=tuple(argument.name for argument in arguments if argument not in tensors),
        results=tuple(
            result.name or f"y{index or ''}" for index, result in enumerate(op._schema.returns)
        ),
        written=tuple(a.name for a in tensors if a.alias_info and a.alias_info.is_write),
        overload=op,
    )


def register(model: onnx.ModelProto) -> None:
    """Make the schemas of a model's own ops known to ``onnx`` in this process.

    After it, ``onnx.checker.check_model(model, check_custom_domain=True)`` checks every call.
    """
    local = {(function.domain, function.name) for function in model.functions}
    graphs = [model.graph.node, *(function.node for function in model.functions)]
    for domain, name in sorted({(n.domain, n.op_type) for nodes in graphs for n in nodes}):
        if domain and (domain, name) not in local and not onnx.defs.has(name, domain):
            onnx.defs.register_schema(schema(domain, name))


def schema(domain: str, name: str) -> OpSchema:
    """The schema of one op of a domain that is not ONNX's own."""
    if domain != DOMAIN:
        return _foreign(domain, name)
    signature = signatures()[name]
    arguments = {argument.name: argument for argument in signature.overload._schema.arguments}
    required = sum(not str(arguments[n].type).startswith("Optional") for n in signature.inputs)
    options = [
        _VARIADIC if "List" in str(arguments[n].type) else _OPTION.Single if i < required
        else _OPTION.Optional
        for i, n in enumerate(signature.inputs)
    ]  # fmt: skip
    lists = [str(result.type).startswith("List") for result in signature.overload._schema.returns]
    results = [(f"{n}_written", _OPTION.Single) for n in signature.written]
    named = zip(signature.results, lists, strict=True)
    results = [(n, _VARIADIC if many else _OPTION.Single) for n, many in named] + results
    return OpSchema(
        name,
        domain,
        VERSION,
        (REFERENCE[signature.overload].__doc__ or "").partition("\n")[0],
        inputs=_parameters(list(zip(signature.inputs, options, strict=True))),
        outputs=_parameters(results),
        type_constraints=_constraints([*signature.inputs, *(n for n, _ in results)]),
        attributes=[
            OpSchema.Attribute(n, _ATTRIBUTES[str(arguments[n].real_type)])
            for n in signature.attributes
        ],
    )


_VARIADIC = _OPTION.Variadic


def _foreign(domain: str, name: str) -> OpSchema:
    many = [("inputs", _VARIADIC)], [("results", _VARIADIC)]
    return OpSchema(
        name,
        domain,
        VERSION,
        inputs=_parameters(many[0]),
        outputs=_parameters(many[1]),
        type_constraints=_constraints(["inputs", "results"]),
        attributes=[OpSchema.Attribute("call", OpSchema.AttrType.STRING)],
    )


def _parameters(
    named: Sequence[tuple[str, OpSchema.FormalParameterOption]],
) -> list[OpSchema.FormalParameter]:
    return [
        OpSchema.FormalParameter(
            name, f"T_{name}", param_option=option, is_homogeneous=False, min_arity=0
        )
        if option == _VARIADIC
        else OpSchema.FormalParameter(name, f"T_{name}", param_option=option)
        for name, option in named
    ]


def _constraints(names: Sequence[str]) -> list[tuple[str, list[str], str]]:
    return [(f"T_{name}", _ANY, "") for name in names]
