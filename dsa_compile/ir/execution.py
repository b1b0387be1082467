"""Execution of graphs: a region as a Python function, and a step as calls of such functions.

The function is straight-line code over the region's inputs, one line a node. Who runs it chooses
the function of every node: a kernel, the CPU reference, or either of them wrapped to wait for it or
to keep its result. A step is a list of :class:`BoundCall`, run one after another over one table of
named values.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.errors import ArtifactError
from dsa_compile.ir.region import Region, Role
from dsa_compile.ops import STREAM_OPS

FunctionOf = Callable[[fx.Node], Callable[..., Any] | None]
"""The function to call for a node, taking its arguments; None leaves the node out."""

Function = Callable[..., tuple[Any, ...]]
"""A compiled region: its inputs by position to its results."""

OnError = Callable[[Exception], Exception]
"""The exception to raise for one that a call raised."""


def reference(node: fx.Node) -> Callable[..., Any] | None:
    """The node's own target, which is the reference on a CPU; stream ops are left out."""
    assert callable(node.target)
    return None if node.target in STREAM_OPS else node.target


def observed(function_of: FunctionOf, record: Callable[[fx.Node, Any], None]) -> FunctionOf:
    """The functions of ``function_of``, each result being handed to ``record`` with its node."""

    def wrapped(node: fx.Node) -> Callable[..., Any] | None:
        function = function_of(node)
        if function is None:
            return None

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            record(node, result)
            return result

        return call

    return wrapped


def compile_region(region: Region, function_of: FunctionOf = reference) -> Function:
    """A region as a function of its inputs, in their order, that returns its results."""
    results: Any = region.graph.output_node().args[0]
    return compile_nodes(
        (node for node in region.graph.nodes if node.op == "call_function"),
        region.inputs(),
        results,
        function_of,
    )


def compile_nodes(
    nodes: Iterable[fx.Node],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    function_of: FunctionOf = reference,
) -> Function:
    """Some calls of a graph as a function.

    Args:
        nodes: the calls, in the order in which they run.
        inputs: nodes whose values are the function's arguments.
        results: nodes whose values it returns.
        function_of: what to call for each node.
    """
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        function = function_of(node)
        if function is not None:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].target = function
    graph.output(tuple(copies[node] for node in results))
    forward: Function = fx.GraphModule(torch.nn.Module(), graph).forward
    return forward


class Recorder:
    """Some calls of a graph as a function that returns every value in them.

    Args:
        nodes: the calls, in the order in which they run.
        inputs: nodes whose values are given.
        function_of: what to call for each node.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        inputs: Sequence[fx.Node],
        function_of: FunctionOf = reference,
    ) -> None:
        self._inputs = [node.name for node in inputs]
        self._values: dict[str, Any] = {}
        self._function = compile_nodes(nodes, inputs, (), observed(function_of, self._keep))

    @classmethod
    def of(cls, region: Region, function_of: FunctionOf = reference) -> "Recorder":
        """Recorder of all calls of a region."""
        calls = (node for node in region.graph.nodes if node.op == "call_function")
        return cls(calls, region.inputs(), function_of)

    def __call__(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of inputs and calls by the names of their nodes.

        Args:
            given: the inputs' values by name; what else is in it is returned as well.
        """
        self._values = values = dict(given)
        self._function(*(values[name] for name in self._inputs))
        return values

    def _keep(self, node: fx.Node, value: Any) -> None:
        self._values[node.name] = value


class BoundCall:
    """One call of a plan with everything but the step's values already in place.

    Args:
        region: for the names of inputs and results.
        function: from :func:`compile_region`.
        fixed: the call's weights and caches, by role and key.
        on_error: makes the exception to raise from the one that the function raised; None raises
            that one.

    Attributes:
        outputs: names of the values that the call returns.

    Raises:
        ArtifactError: the graph takes a weight or cache that is not there, or of another shape.
    """

    def __init__(
        self,
        region: Region,
        function: Function,
        fixed: Mapping[Role, Mapping[str, Tensor]],
        on_error: OnError | None = None,
    ) -> None:
        self._function, self._on_error = function, on_error
        self.outputs = region.outputs
        self._arguments: list[Any] = []
        self._open: list[tuple[int, str]] = []
        for index, node in enumerate(region.inputs()):
            role, key = node.meta["role"], node.meta["key"]
            if role in fixed:
                self._arguments.append(_fixed(region, node, fixed[role]))
            else:
                self._open.append((index, key))
                self._arguments.append(None)

    def within(self, around: Callable[[Function], Function]) -> "BoundCall":
        """Call whose function runs as ``around`` makes it."""
        other = copy(self)
        other._function = around(self._function)
        return other

    def run(self, values: dict[str, Any]) -> None:
        """Call with the step's values by name; results replace the values of their names.

        Raises:
            Exception: what ``on_error`` makes of an error of the function.
        """
        arguments = self._arguments.copy()
        for index, key in self._open:
            arguments[index] = values[key]
        try:
            results = self._function(*arguments)
        except Exception as error:
            if self._on_error is None:
                raise
            raise self._on_error(error) from error
        values.update(zip(self.outputs, results, strict=True))


def run_calls(calls: Iterable[BoundCall], values: dict[str, Any]) -> None:
    """Run a step.

    Args:
        calls: of a plan, in order.
        values: the step's inputs by name; changed to hold every value that a call returned.
    """
    for call in calls:
        call.run(values)


def _fixed(region: Region, node: fx.Node, tensors: Mapping[str, Tensor]) -> Tensor:
    key, wanted = node.meta["key"], node.meta["val"]
    found = tensors.get(key)
    sizes = () if found is None else zip(wanted.shape, found.shape, strict=False)
    if (
        found is None
        or (found.dtype, found.dim()) != (wanted.dtype, len(wanted.shape))
        or any(isinstance(size, int) and size != actual for size, actual in sizes)
    ):
        raise ArtifactError(
            f"region {region.name!r}: its graph and the weight plan disagree on {key!r}; "
            "the artifact was edited, recompile"
        )
    return found
