"""Timing calls where they stand: which are timed, on what; the clock is a stand-in."""

import pytest
import torch
from torch import fx

from dsa_compile.artifact.records import KernelRecord
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.streams import has_streams
from dsa_compile.ir.tensor_info import TensorInfo
from dsa_compile.measure.step import call_times
from dsa_compile.measure.step.call_times import CallTimer
from dsa_compile.runtime.execution.executor import bind

aten, dsa = torch.ops.aten, torch.ops.dsa
KERNELS = {"dsa.linear.default": (KernelRecord("reference"),)}
WIDE = 1024  # a weight of 4 MB, which a cache could hold


def region():
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    x.meta |= {"role": Role.VALUE, "key": "x", "val": TensorInfo(torch.float32, ("T", WIDE))}
    weight.meta |= {"role": Role.WEIGHT, "key": "w", "val": TensorInfo(torch.float32, (WIDE, WIDE))}

    def call(op, *args):
        node = graph.create_node("call_function", op, args)
        node.meta["val"] = TensorInfo(torch.float32, ("T", WIDE))
        return node

    first = call(dsa.linear.default, x, weight)
    call(dsa.record_event.default, 0)
    call(dsa.on_stream.default, 1)
    call(dsa.wait_event.default, 0)
    view = call(aten.view.default, first, [-1, WIDE])
    second = call(dsa.linear.default, view, weight)
    call(dsa.record_event.default, 1)
    call(dsa.on_stream.default, 0)
    call(dsa.wait_event.default, 1)
    graph.output((call(aten.relu.default, second),))
    return Region("moe", graph, ("y",))


@pytest.fixture
def timed(monkeypatch):
    """Calls that were handed to the clock; each took as long as there were of them."""
    found = []

    def clock(calls, replays):
        results = [call() for call in calls]
        assert all(torch.equal(result, results[0]) for result in results)
        found.append(len(calls))
        return float(len(calls))

    monkeypatch.setattr(call_times, "graph_median", clock)
    return found


def test_each_call_is_timed_once_on_weights_that_are_cold(timed):
    timer = CallTimer()
    (copy,) = timer.within({"moe": region()}, KERNELS, "cpu").values()
    assert not has_streams(copy.graph)
    run = bind(copy, KERNELS, "cpu")
    x, weight = torch.randn(2, WIDE), torch.randn(WIDE, WIDE)
    for _ in range(2):
        (result,) = run(x, weight)
    assert torch.equal(result, bind(region(), KERNELS, "cpu")(x, weight)[0])
    assert timer.times == {
        "dsa.linear.default(f32[T, 1024], f32[1024, 1024])": 12.0,
        "aten.relu.default(f32[T, 1024])": 1.0,
    }
    assert timed == [12, 1]
