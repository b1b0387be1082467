"""Kernels of a region: every op bound to its provider's function, past the dispatcher.

One function serves all layers of a kind; what differs between layers are its arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.artifact.records import KernelRecord
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.ir.execution import Function, compile_region
from dsa_compile.ir.region import Region
from dsa_compile.ir.streams import has_streams
from dsa_compile.kernels.registry import load
from dsa_compile.ops import STREAM_OPS
from dsa_compile.runtime.execution.streams import SideStreams, StreamSwitch

aten = torch.ops.aten

# The same functions as their overloads, reached without the overload's Python wrapper (2 µs less a
# call). Only those whose arguments are taken by position in the same order.
_DIRECT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.cat.default: torch.cat,
    aten.index_select.default: torch.index_select,
    aten.mul.Tensor: torch.mul,
    aten.reshape.default: torch.Tensor.reshape,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.squeeze.dim: torch.squeeze,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
}

Kernels = Mapping[str, tuple[KernelRecord, ...]]


def bind(
    region: Region,
    kernels: Kernels,
    target: str,
    streams: SideStreams | None = None,
    wait: Callable[[], None] | None = None,
    watching: Callable[[fx.Node, Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Function:
    """Compile a region.

    Args:
        region: of the KERNEL level.
        kernels: providers of each op, by the op's full name.
        target: what the artifact was compiled for.
        streams: to put the region's side streams on; regions that never run at the same time may
            share them. None for some of its own.
        wait: called after every op, to wait until it has run: then there is one stream, and what
            an op does wrong is raised before the next. None to wait for nothing.
        watching: makes the function of a node from the one that it has; None to leave it.

    Returns:
        A function of the region's inputs, in their order, that returns its outputs.

    Raises:
        ArtifactError: an op without a provider, or a provider this installation lacks.
    """
    overlapped = target != "cpu" and has_streams(region.graph) and wait is None
    switch = StreamSwitch(streams or SideStreams()) if overlapped else None

    def function_of(node: fx.Node) -> Callable[..., Any] | None:
        if node.target in STREAM_OPS:
            return None if switch is None else switch.function(node.target)
        function = implementation(node.target, kernels, target)
        if watching is not None:
            function = watching(node, function)
        return function if wait is None else _waiting(function, wait)

    forward = compile_region(region, function_of)
    return forward if switch is None else switch.around(forward)


def implementation(op: Any, kernels: Kernels, target: str) -> Callable[..., Any]:
    """Function that :func:`bind` calls for an op.

    Raises:
        ArtifactError: as :func:`bind`.
    """
    name = str(op)
    if not name.startswith("dsa."):
        direct: Callable[..., Any] = _DIRECT.get(op, op)
        return direct
    chosen = [(k.max_tokens, _load(name, k.provider, target)) for k in kernels.get(name, ())]
    if not chosen:
        raise ArtifactError(f"{name}: the artifact binds no kernel to it; recompile")
    if len(chosen) == 1:
        return chosen[0][1]
    return _by_tokens([(limit or 0, function) for limit, function in chosen[:-1]], chosen[-1][1])


def _load(name: str, provider: str, target: str) -> Callable[..., Any]:
    try:
        function = load(name.split(".")[1], provider, target)
    except UserError as error:
        raise ArtifactError(f"{error}; install it, or recompile without it") from None
    if function is None:
        raise ArtifactError(
            f"{name}: provider {provider!r} for target {target!r} is not available here; "
            "the artifact was compiled by another version, recompile"
        )
    return function


def _by_tokens(
    limited: Sequence[tuple[int, Callable[..., Any]]], beyond: Callable[..., Any]
) -> Callable[..., Any]:
    """The first function whose limit admits a call's tokens, the rows of its first argument."""

    def call(first: Tensor, *rest: Any) -> Any:
        tokens = first.shape[0]
        for limit, function in limited:
            if tokens <= limit:
                return function(first, *rest)
        return beyond(first, *rest)

    return call


def _waiting(function: Callable[..., Any], wait: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        wait()
        return result

    return call


def require_kernels(regions: Iterable[Region], kernels: Kernels, target: str) -> None:
    """Check that everything :func:`bind` would call is here.

    Raises:
        ArtifactError: as :func:`bind`.
    """
    called = {node.target for region in regions for node in region.graph.nodes
              if node.op == "call_function" and node.target not in STREAM_OPS}  # fmt: skip
    for op in sorted(called, key=str):
        implementation(op, kernels, target)
