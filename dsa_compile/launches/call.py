"""One call of a graph, made on tensors of any sizes."""

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.ir.region import Role
from dsa_compile.ir.tensor_info import TensorInfo, describe, size_in

Choice = tuple[float, Callable[..., Any] | None]
"""The most tokens that a function takes, and the function; None for one that is not of interest."""


class Call:
    """A call whose kernel depends on the sizes of a step; made once for each set of sizes.

    Args:
        node: of a graph at the KERNEL level.
        choices: functions in ascending order of tokens, the rows of the first argument.
        device: of the tensors it is made on.
    """

    def __init__(self, node: fx.Node, choices: Sequence[Choice], device: str = "meta") -> None:
        self._node, self._choices, self._device = node, choices, device
        self._infos = {leaf: _info(leaf) for leaf in _leaves(node)}
        self._sizes = sorted(
            {size for info in self._infos.values() for size in info.shape if isinstance(size, str)}
        )
        self._made: set[tuple[int, ...]] = set()

    def make(self, sizes: Mapping[str, int]) -> None:
        """Call the function for a step of these sizes, unless it has been called for them."""
        key = tuple(size_in(size, sizes) for size in self._sizes)
        if key in self._made:
            return
        self._made.add(key)
        args: Any = fx.map_arg(self._node.args, lambda arg: self._value(arg, sizes))
        tokens = args[0].shape[0] if isinstance(args[0], Tensor) else args[0][0].shape[0]
        function = next(function for limit, function in self._choices if tokens <= limit)
        if function is not None:
            function(*args)

    def _value(self, node: fx.Node, sizes: Mapping[str, int]) -> Any:
        """Value of a node: a view where the node is a view, so that its strides are the step's."""
        if _is_view(node):
            args = fx.map_arg(node.args, lambda arg: self._value(arg, sizes))
            return node.target(*args)  # type: ignore[operator]
        info = self._infos[node]
        shape = [size_in(size, sizes) for size in info.shape]
        make = torch.empty if self._device == "meta" else torch.zeros
        # torch.compile tells tensors apart by whether they were made in inference mode
        kept = node.meta.get("role") in (Role.WEIGHT, Role.CACHE)
        with torch.inference_mode(torch.is_inference_mode_enabled() and not kept):
            return make(shape, dtype=info.dtype, device=self._device)


def form_of(node: fx.Node) -> Hashable:
    """Key of a call, equal for calls of any regions that launch the same kernels."""
    return node.target, _form(node.args)


def _form(value: Any) -> Hashable:
    if isinstance(value, fx.Node):
        if _is_view(value):
            return form_of(value)
        info = _info(value)
        return info.dtype, tuple(info.shape), value.meta.get("role") in (Role.WEIGHT, Role.CACHE)
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return type(value), value  # 1, 1.0 and True are not alike


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result lies in the memory of another's, and may not be dense."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if node.target is torch.ops.aten.reshape.default:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return False
    return any(argument.alias_info is not None for argument in node.target._schema.arguments)


def _leaves(node: fx.Node) -> list[fx.Node]:
    """The nodes that a call's arguments are, or are views of."""
    found = []
    for arg in node.all_input_nodes:
        found += _leaves(arg) if _is_view(arg) else [arg]
    return found


def _info(node: fx.Node) -> TensorInfo:
    info = describe(node.meta["val"])
    assert isinstance(info, TensorInfo), (node, info)
    return info
