"""Time of every call of a decode step by itself: what ``overlap_streams`` plans from."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.region import Region
from dsa_compile.ir.storage import Memory
from dsa_compile.ir.stream_profile import Profile, call_key
from dsa_compile.measure.lock import exclusive
from dsa_compile.measure.step.cases import Decode
from dsa_compile.measure.step.model import Compiled
from dsa_compile.measure.timing import graph_median
from dsa_compile.ops import STREAM_OPS
from dsa_compile.runtime.execution.executor import Kernels, implementation
from dsa_compile.runtime.execution.model_runner import ModelRunner

_COLD = 150 << 20  # bytes of one operand's copies, three times the L2 cache of an H200
_MOST_COPIES = 12
_SMALL = 1 << 20  # operands below this are what the call before has just written
_REPLAYS = 9


class CallTimer:
    """Times calls where they stand, on the tensors that they get there.

    Attributes:
        times: microseconds by :func:`~dsa_compile.ir.stream_profile.call_key`.
    """

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def within(
        self, regions: Mapping[str, Region], kernels: Kernels, target: str
    ) -> dict[str, Region]:
        """Copies of regions that time each call the first time that it is made."""
        return {name: self._copy(region, kernels, target) for name, region in regions.items()}

    def _copy(self, region: Region, kernels: Kernels, target: str) -> Region:
        copy = region.copy(region.name)
        for node in [node for node in copy.graph.nodes if node.target in STREAM_OPS]:
            copy.graph.erase_node(node)
        for node in Memory(copy.graph).uses:
            node.target = self._timed(call_key(node), implementation(node.target, kernels, target))
        return copy

    def _timed(self, key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if key not in self.times:
                self.times[key] = 0.0
                variants = _cold(args)
                calls = [lambda given=given: function(*given, **kwargs) for given in variants]
                self.times[key] = graph_median(calls, _REPLAYS)
            return result

        return call


def _cold(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments, and copies of the large ones, enough that none is still in the L2 cache."""
    sizes = [a.numel() * a.element_size() if isinstance(a, Tensor) else 0 for a in args]
    large = [i for i, size in enumerate(sizes) if _SMALL <= size < _COLD]
    total = sum(sizes[i] for i in large)
    copies = min(_MOST_COPIES, -(-_COLD // total)) if large else 1
    more = [
        tuple(a.clone() if i in large else a for i, a in enumerate(args)) for _ in range(copies - 1)
    ]
    return [args, *more]


def profile_calls(compiled: Compiled, runner: ModelRunner, case: Decode) -> Profile:
    """Time the calls of a decode step, of its short variant if the case is short.

    Args:
        compiled: what to time.
        runner: over it.
        case: fits into the caches.
    """
    timer = CallTimer()
    manifest = compiled.manifest
    regions = timer.within(compiled.regions, manifest.kernels, manifest.target)
    (batch,) = case.steps(runner.block_size, runner.vocab_size)
    with exclusive():
        runner.variation(regions=regions).forward(batch)
    return Profile(
        torch.cuda.get_device_name(), manifest.target, case.batch, case.context, timer.times
    )
