"""The nodes of an ONNX function while it is being written."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

DTYPES: Mapping[str, int] = {
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "int16": TensorProto.INT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "float8_e5m2": TensorProto.FLOAT8E5M2,
}
"""ONNX's number for each dtype, by its name in torch."""


def tensor_type(val: Any) -> onnx.TypeProto | None:
    """The ONNX type of what a recorded node yields; None for a list or nothing.

    Args:
        val: the ``val`` of a node's record: ``{"dtype", "shape"}``, or ``{"scalar"}`` for a size,
            which ONNX holds as an int64 tensor without dimensions.
    """
    if not isinstance(val, dict):
        return None
    if "scalar" in val:
        return helper.make_tensor_type_proto(TensorProto.INT64, ())
    return helper.make_tensor_type_proto(DTYPES[val["dtype"]], val["shape"])


class Body:
    """A list of nodes in the making; values are the names of ONNX's edges."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._notes: dict[str, str] = {}
        self._stem = ""
        self._count = 0

    def about(self, stem: str, notes: Mapping[str, str]) -> None:
        """Set names and notes of the next nodes: ``stem`` is or begins their names."""
        self._stem, self._notes, self._count = stem, dict(notes), 0

    def emit(
        self,
        op: str,
        *inputs: str,
        out: str | Sequence[str] | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node.

        Args:
            op: its type.
            inputs: values; "" for an optional one that is left out.
            out: names of its results; a fresh one if None.
            domain: of ``op``; "" is ONNX's own.
            attributes: those that are None are left out.

        Returns:
            The name of its first result, "" if it has none.
        """
        self._count += 1
        name = f"{self._stem}/{op}_{self._count}" if out is None else self._stem
        outputs = [f"{self._stem}/{self._count}"] if out is None else out
        outputs = [outputs] if isinstance(outputs, str) else list(outputs)
        node = helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes)
        helper.set_metadata_props(node, self._notes)
        self.nodes.append(node)
        return outputs[0] if outputs else ""

    def constant(self, value: int | float, like: str | None = None) -> str:
        """A number as a tensor without dimensions: int64 or fp32, or of the dtype of ``like``."""
        kind = {"value_int": value} if isinstance(value, int) else {"value_float": value}
        made = self.emit("Constant", **kind)
        return made if like is None else self.emit("CastLike", made, like)

    def ints(self, entries: Sequence[int | str]) -> str:
        """An int64 list of numbers and of sizes that are values."""
        if all(isinstance(entry, int) for entry in entries):
            return self.emit("Constant", value_ints=list(entries))
        one = self.emit("Constant", value_ints=[1])
        parts = [
            self.emit("Constant", value_ints=[entry])
            if isinstance(entry, int)
            else self.emit("Reshape", entry, one)
            for entry in entries
        ]
        return self.emit("Concat", *parts, axis=0)
