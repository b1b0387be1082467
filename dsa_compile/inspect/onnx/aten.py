"""ATen ops as standard ONNX ops: those that a graph of the LOGICAL level or later may name.

Each function takes the body and one bound :class:`Call`, and writes its nodes. Earlier levels have
many more ATen ops; they are exported as calls of a custom domain, to look at.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_compile.inspect.onnx.body import DTYPES, Body


@dataclass(frozen=True)
class Value:
    """A tensor or size that an earlier node made: its name, dtype and rank (None if unknown)."""

    name: str
    dtype: str
    rank: int | None


@dataclass(frozen=True)
class Call:
    """One call of an op.

    Attributes:
        arguments: by name, as the op's schema has them; defaults are filled in.
        outputs: names for its results.
        dtype: of its result.
    """

    arguments: Mapping[str, Any]
    outputs: Sequence[str]
    dtype: str

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def x(self) -> Value:
        """The first argument, a tensor."""
        value = next(iter(self.arguments.values()))
        assert isinstance(value, Value)
        return value

    def axis(self, name: str, rank: int | None = None) -> int:
        """A dimension, counted from the front, in a tensor of that rank (default: of ``x``)."""
        rank = self.x.rank if rank is None else rank
        assert rank is not None
        return int(self[name]) % rank


Writer = Callable[[Body, Call], None]


def convert(body: Body, target: str, call: Call) -> bool:
    """Write one ATen call, such as ``"aten.view.default"``; False if it has no standard form."""
    writer = _WRITERS.get(target)
    if writer is None:
        return False
    writer(body, call)
    return True


def _sizes(entries: Sequence[Any]) -> list[int | str]:
    return [entry.name if isinstance(entry, Value) else int(entry) for entry in entries]


def _view(body: Body, call: Call) -> None:
    shape = body.ints(_sizes(call["size"] if "size" in call.arguments else call["shape"]))
    body.emit("Reshape", call.x.name, shape, out=call.outputs)


def _flatten(body: Body, call: Call) -> None:
    head = body.emit("Shape", call.x.name, start=0, end=call.axis("start_dim"))
    tail = body.emit("Shape", call.x.name, start=call.axis("end_dim") + 1)
    shape = body.emit("Concat", head, body.ints([-1]), tail, axis=0)
    body.emit("Reshape", call.x.name, shape, out=call.outputs)


def _unflatten(body: Body, call: Call) -> None:
    axis = call.axis("dim")
    head = body.emit("Shape", call.x.name, start=0, end=axis)
    tail = body.emit("Shape", call.x.name, start=axis + 1)
    shape = body.emit("Concat", head, body.ints(_sizes(call["sizes"])), tail, axis=0)
    body.emit("Reshape", call.x.name, shape, out=call.outputs)


def _transpose(body: Body, call: Call) -> None:
    assert call.x.rank is not None
    order = list(range(call.x.rank))
    first, second = call.axis("dim0"), call.axis("dim1")
    order[first], order[second] = order[second], order[first]
    body.emit("Transpose", call.x.name, perm=order, out=call.outputs)


def _permute(body: Body, call: Call) -> None:
    assert call.x.rank is not None
    order = [dim % call.x.rank for dim in call["dims"]]
    body.emit("Transpose", call.x.name, perm=order, out=call.outputs)


def _expand(body: Body, call: Call) -> None:
    # -1 keeps a size; ONNX broadcasts in both directions, so 1 does
    sizes = [1 if size == -1 else size for size in _sizes(call["size"])]
    body.emit("Expand", call.x.name, body.ints(sizes), out=call.outputs)


def _unsqueeze(body: Body, call: Call) -> None:
    body.emit("Unsqueeze", call.x.name, body.ints([call["dim"]]), out=call.outputs)


def _squeeze(body: Body, call: Call) -> None:
    body.emit("Squeeze", call.x.name, body.ints([call["dim"]]), out=call.outputs)


def _split(body: Body, call: Call) -> None:
    sizes = body.ints(_sizes(call["split_sizes"]))
    body.emit("Split", call.x.name, sizes, axis=call["dim"], out=call.outputs)


def _cat(body: Body, call: Call) -> None:
    names = [value.name for value in call["tensors"]]
    body.emit("Concat", *names, axis=call["dim"], out=call.outputs)


def _stack(body: Body, call: Call) -> None:
    axis = body.ints([call["dim"]])
    parts = [body.emit("Unsqueeze", value.name, axis) for value in call["tensors"]]
    body.emit("Concat", *parts, axis=call["dim"], out=call.outputs)


def _slice(body: Body, call: Call) -> None:
    start, end = call["start"] or 0, call["end"]
    # an end of None or of 2**63 - 1 means the last element in both
    bounds = [body.ints(_sizes([bound])) for bound in (start, 2**63 - 1 if end is None else end)]
    axis, step = body.ints([call["dim"]]), body.ints([call["step"]])
    body.emit("Slice", call.x.name, *bounds, axis, step, out=call.outputs)


def _select(body: Body, call: Call) -> None:
    index = body.constant(int(call["index"]))
    body.emit("Gather", call.x.name, index, axis=call["dim"], out=call.outputs)


def _index_select(body: Body, call: Call) -> None:
    body.emit("Gather", call.x.name, call["index"].name, axis=call["dim"], out=call.outputs)


def _embedding(body: Body, call: Call) -> None:
    body.emit("Gather", call["weight"].name, call["indices"].name, axis=0, out=call.outputs)


def _size(body: Body, call: Call) -> None:
    axis = call.axis("dim")
    size = body.emit("Shape", call.x.name, start=axis, end=axis + 1)
    body.emit("Squeeze", size, out=call.outputs)


def _copy(body: Body, call: Call) -> None:
    body.emit("Identity", call.x.name, out=call.outputs)


def _cast(body: Body, call: Call) -> None:
    body.emit("Cast", call.x.name, to=DTYPES[call.dtype], out=call.outputs)


def _operand(body: Body, operand: Any, dtype: str) -> str:
    """An operand in the dtype that the op computes in; numbers become tensors."""
    if not isinstance(operand, Value):
        return body.emit("Cast", body.constant(operand), to=DTYPES[dtype])
    return operand.name if operand.dtype == dtype else body.emit(
        "Cast", operand.name, to=DTYPES[dtype]
    )  # fmt: skip


def _binary(op: str) -> Writer:
    def write(body: Body, call: Call) -> None:
        left, right = (_operand(body, call[name], call.dtype) for name in ("self", "other"))
        if call.arguments.get("alpha", 1) != 1:
            right = body.emit("Mul", right, _operand(body, call["alpha"], call.dtype))
        body.emit(op, left, right, out=call.outputs)

    return write


def _unary(op: str) -> Writer:
    return lambda body, call: (body.emit(op, call.x.name, out=call.outputs), None)[1]


def _rsqrt(body: Body, call: Call) -> None:
    body.emit("Reciprocal", body.emit("Sqrt", call.x.name), out=call.outputs)


def _silu(body: Body, call: Call) -> None:
    gate = body.emit("Sigmoid", call.x.name)
    body.emit("Mul", call.x.name, gate, out=call.outputs)


def _power(body: Body, call: Call) -> None:
    exponent = _operand(body, call["exponent"], call.dtype)
    body.emit("Pow", call.x.name, exponent, out=call.outputs)


def _clamp(body: Body, call: Call) -> None:
    bounds = [
        "" if bound is None else _operand(body, bound, call.dtype)
        for bound in (call["min"], call["max"])
    ]
    body.emit("Clip", call.x.name, *bounds, out=call.outputs)


def _reduce(op: str) -> Writer:
    def write(body: Body, call: Call) -> None:
        source = _operand(body, call.x, call.dtype)
        axes = "" if call["dim"] is None else body.ints(list(call["dim"]))
        body.emit(op, source, axes, keepdims=int(call["keepdim"]), out=call.outputs)

    return write


def _linear(body: Body, call: Call) -> None:
    weight = body.emit("Transpose", call["weight"].name, perm=[1, 0])
    if call["bias"] is None:
        body.emit("MatMul", call["input"].name, weight, out=call.outputs)
        return
    product = body.emit("MatMul", call["input"].name, weight)
    body.emit("Add", product, call["bias"].name, out=call.outputs)


def _layer_norm(body: Body, call: Call) -> None:
    optional = [call[name].name if call[name] else "" for name in ("weight", "bias")]
    axis = -len(call["normalized_shape"])
    body.emit(
        "LayerNormalization", call["input"].name, *optional,
        axis=axis, epsilon=float(call["eps"]), out=call.outputs,
    )  # fmt: skip


_WRITERS: Mapping[str, Writer] = {
    "aten.alias.default": _copy,
    "aten.clone.default": _copy,
    "aten.contiguous.default": _copy,
    "aten.detach.default": _copy,
    "aten.to.dtype": _cast,
    "aten.to.dtype_layout": _cast,
    "aten.view.default": _view,
    "aten.reshape.default": _view,
    "aten.flatten.using_ints": _flatten,
    "aten.unflatten.int": _unflatten,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _permute,
    "aten.expand.default": _expand,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.squeeze.dim": _squeeze,
    "aten.split_with_sizes.default": _split,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.index_select.default": _index_select,
    "aten.embedding.default": _embedding,
    "aten.sym_size.int": _size,
    "aten.add.Tensor": _binary("Add"),
    "aten.add.Scalar": _binary("Add"),
    "aten.sub.Tensor": _binary("Sub"),
    "aten.sub.Scalar": _binary("Sub"),
    "aten.mul.Tensor": _binary("Mul"),
    "aten.mul.Scalar": _binary("Mul"),
    "aten.div.Tensor": _binary("Div"),
    "aten.div.Scalar": _binary("Div"),
    "aten.matmul.default": _binary("MatMul"),
    "aten.neg.default": _unary("Neg"),
    "aten.relu.default": _unary("Relu"),
    "aten.sigmoid.default": _unary("Sigmoid"),
    "aten.cos.default": _unary("Cos"),
    "aten.sin.default": _unary("Sin"),
    "aten.rsqrt.default": _rsqrt,
    "aten.silu.default": _silu,
    "aten.pow.Tensor_Scalar": _power,
    "aten.clamp.default": _clamp,
    "aten.mean.dim": _reduce("ReduceMean"),
    "aten.sum.dim_IntList": _reduce("ReduceSum"),
    "aten.linear.default": _linear,
    "aten.layer_norm.default": _layer_norm,
}
