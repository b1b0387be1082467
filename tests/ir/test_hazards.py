"""The checker of streams and captures: one planted hazard of each kind, with its exact report."""

import operator

import pytest
import torch
from torch import fx

from dsa_compile.ir.hazard import HazardKind
from dsa_compile.ir.hazards import find_hazards
from dsa_compile.ir.region import Region, Role

aten, dsa = torch.ops.aten, torch.ops.dsa


class Sketch:
    """A graph written call by call; names are given, so that reports can be compared."""

    def __init__(self, *inputs: str) -> None:
        self.graph = fx.Graph()
        for name in inputs:
            node = self.graph.placeholder(name)
            node.meta |= {"role": Role.VALUE, "key": name}
            setattr(self, name, node)

    def call(self, op, *args, name=None):
        return self.graph.create_node("call_function", op, args, {}, name)

    def on(self, stream):
        return self.call(dsa.on_stream.default, stream)

    def record(self, event):
        return self.call(dsa.record_event.default, event)

    def wait(self, event):
        return self.call(dsa.wait_event.default, event)

    def relu(self, x, name):
        return self.call(aten.relu.default, x, name=name)

    def add(self, x, y, name):
        return self.call(aten.add.Tensor, x, y, name=name)

    def keep(self, *tensors):
        return self.call(dsa.keep_alive.default, list(tensors))

    def region(self, *results):
        self.graph.output(results)
        return Region("moe.long", self.graph, tuple(node.name for node in results))


def hazards(region, **kwargs):
    return list(find_hazards(region, **kwargs))


def only(region, **kwargs):
    (found,) = hazards(region, **kwargs)
    return found


def fork(s, stream=1, event=0):
    s.record(event)
    s.on(stream)
    s.wait(event)


def join(s, event=1):
    s.record(event)
    s.on(0)
    s.wait(event)


def test_a_sound_fork_and_join():
    s = Sketch("x")
    fork(s)
    a = s.relu(s.x, "a")
    join(s)
    assert hazards(s.region(s.add(a, s.x, "b"))) == []


def test_no_streams_no_hazards():
    s = Sketch("x")
    assert hazards(s.region(s.relu(s.x, "a"))) == []


def test_a_read_that_does_not_wait_for_the_write():
    s = Sketch("x")
    fork(s)
    s.on(0)
    a = s.relu(s.x, "a")
    s.on(1)
    b = s.relu(a, "b")
    join(s)
    found = only(s.region(s.add(a, b, "c")))
    assert (found.kind, found.first, found.second) == (HazardKind.RACE, "a", "b")
    assert str(found) == (
        "moe.long: race: a on stream 0 and b on stream 1 use a, at least one writes it, and "
        "nothing orders them; record an event after a and wait for it on stream 1 before b"
    )


def test_a_cache_written_on_one_stream_and_read_on_another():
    """The op's schema says that it writes; the race is found through the cache."""
    s = Sketch("k", "cache", "slots")
    fork(s)
    s.call(dsa.write_index_cache.default, s.k, s.cache, s.slots, name="write")
    end = s.record(1)
    s.on(0)
    read = s.relu(s.cache, "read")
    s.wait(1)
    found = only(s.region(read))
    assert (found.kind, found.first, found.second) == (HazardKind.RACE, "write", "read")
    assert "use cache" in found.problem
    end.next.next.prepend(end.next.next.next)  # the wait before the read
    assert hazards(Region("moe.long", s.graph, ("read",))) == []


def test_a_write_after_a_read():
    s = Sketch("k", "cache", "slots")
    fork(s)
    read = s.relu(s.cache, "read")
    s.record(1)
    s.on(0)
    s.call(dsa.write_index_cache.default, s.k, s.cache, s.slots, name="write")
    s.wait(1)
    s.keep(read)
    found = only(s.region(s.relu(s.k, "z")))
    assert (found.kind, found.first, found.second) == (HazardKind.RACE, "read", "write")


def test_a_race_through_a_view():
    s = Sketch("x")
    fork(s)
    s.on(0)
    a = s.relu(s.x, "a")
    view = s.call(aten.view.default, a, [-1], name="view")
    part = s.call(aten.split_with_sizes.default, view, [1, 1], name="parts")
    one = s.call(operator.getitem, part, 1, name="one")
    s.on(1)
    b = s.relu(one, "b")
    join(s)
    found = only(s.region(s.add(a, b, "c")))
    assert (found.kind, found.first, found.second) == (HazardKind.RACE, "a", "b")


def test_an_order_by_way_of_a_third_stream():
    s = Sketch("x")
    fork(s, 1, 0)
    a = s.relu(s.x, "a")
    fork(s, 2, 1)
    b = s.relu(a, "b")
    join(s, 2)
    assert hazards(s.region(s.add(a, b, "c"))) == []


def dropped(keep):
    """``a`` is made on stream 0, read on stream 1, and dropped while that may be running."""
    s = Sketch("x")
    a = s.relu(s.x, "a")
    fork(s)
    b = s.relu(a, "b")
    s.record(1)
    s.on(0)
    c = s.relu(s.x, "c")
    s.wait(1)
    if keep:
        s.keep(a)
    return s.region(s.add(b, c, "d"))


def test_memory_given_out_while_another_stream_reads_it():
    found = only(dropped(keep=False))
    assert (found.kind, found.first, found.second) == (HazardKind.FREED_EARLY, "b", "c")
    assert str(found) == (
        "moe.long: freed early: a is made on stream 0 and used by b on stream 1; the host drops it "
        "before c, which may get its memory, without waiting; let stream 0 wait for b before c, or "
        "add keep_alive of a after such a wait"
    )


def test_memory_that_is_held_until_the_join():
    assert hazards(dropped(keep=True)) == []


def test_memory_of_a_side_stream_read_on_the_main_one():
    """The side stream goes on without waiting for the reader."""
    s = Sketch("x")
    fork(s)
    a = s.relu(s.x, "a")
    s.record(1)
    s.on(0)
    s.wait(1)
    b = s.relu(a, "b")
    s.on(1)
    c = s.relu(s.x, "c")
    join(s, 2)
    found = only(s.region(s.add(b, c, "d")))
    assert (found.kind, found.first, found.second) == (HazardKind.FREED_EARLY, "b", "c")


def test_a_result_of_a_side_stream():
    s = Sketch("x")
    fork(s)
    a = s.relu(s.x, "a")
    join(s)
    found = only(s.region(a))
    assert (found.kind, found.first, found.second) == (HazardKind.RESULT, "a", "output")


def test_a_side_stream_that_waits_for_nothing():
    s = Sketch("x")
    s.on(1)
    a = s.relu(s.x, "a")
    join(s)
    found = only(s.region(s.relu(a, "b")))
    assert (found.kind, found.first, found.second) == (HazardKind.NOT_FORKED, "a", "a")
    assert found.remedy == "record an event on stream 0 and wait for it before a"


def test_an_event_of_a_stream_outside_the_capture():
    s = Sketch("x")
    s.on(1)
    s.record(0)
    s.on(0)
    s.wait(0)
    found = only(s.region(s.relu(s.x, "a")))
    assert (found.kind, found.first, found.second) == (
        HazardKind.NOT_FORKED,
        "record_event_default",
        "wait_event_default",
    )


def test_a_side_stream_that_nobody_waits_for():
    s = Sketch("k", "cache", "slots")
    fork(s)
    s.call(dsa.write_index_cache.default, s.k, s.cache, s.slots, name="write")
    s.on(0)
    found = only(s.region(s.relu(s.k, "a")))
    assert (found.kind, found.first, found.second) == (HazardKind.NOT_JOINED, "write", "output")
    assert found.problem == "stream 0 does not wait for write on stream 1"


def test_a_region_that_ends_on_a_side_stream():
    s = Sketch("x")
    a = s.relu(s.x, "a")
    s.on(1)
    found = only(s.region(a))
    assert (found.kind, found.first) == (HazardKind.NOT_JOINED, "on_stream_default")
    assert found.remedy == "add on_stream(0) at the end"


@pytest.mark.parametrize("later", [False, True])
def test_a_wait_for_an_event_not_recorded_before(later):
    s = Sketch("x")
    a = s.relu(s.x, "a")
    s.wait(7)
    if later:
        s.record(7)
    found = only(s.region(a))
    assert (found.kind, found.first) == (HazardKind.NOT_RECORDED, "wait_event_default")
    assert found.remedy == "add record_event(7) before wait_event_default"


@pytest.mark.parametrize("stream", [-1, 8])
def test_streams_out_of_range(stream):
    s = Sketch("x")
    s.on(stream)
    s.on(0)
    found = only(s.region(s.relu(s.x, "a")))
    assert (found.kind, found.first) == (HazardKind.NO_STREAM, "on_stream_default")


def test_a_collective_on_a_side_stream():
    s = Sketch("x")
    fork(s)
    a = s.call(aten.neg.default, s.x, name="all_reduce")
    join(s)
    region = s.region(s.relu(a, "b"))
    found = only(region, collectives={aten.neg.default})
    assert (found.kind, found.second) == (HazardKind.COLLECTIVE, "all_reduce")
    assert found.remedy == "add on_stream(0) before all_reduce"
    assert hazards(region) == []


@pytest.mark.parametrize("op", [aten.nonzero.default, aten.item.default, aten.equal.default])
def test_ops_that_make_the_host_wait(op):
    s = Sketch("x")
    a = s.relu(s.x, "a")
    s.call(op, *([a, a] if op is aten.equal.default else [a]), name="sync")
    found = only(s.region(a))
    assert (found.kind, found.first, found.second) == (HazardKind.HOST_SYNC, "a", "sync")


@pytest.mark.parametrize("op", [aten.bernoulli.default, aten.lift_fresh_copy.default])
def test_ops_that_capture_would_freeze(op):
    s = Sketch("x")
    a = s.relu(s.x, "a")
    found = only(s.region(s.call(op, a, name="frozen")))
    assert (found.kind, found.first, found.second) == (HazardKind.FROZEN, "a", "frozen")


def test_a_number_from_the_host():
    s = Sketch("x")
    size = s.call(aten.sym_size.int, s.x, 0, name="size")
    found = only(s.region(s.call(aten.mul.Scalar, s.x, size, name="scaled")))
    assert (found.kind, found.first, found.second) == (HazardKind.FROZEN, "size", "scaled")
    assert "as other from the host" in found.problem
