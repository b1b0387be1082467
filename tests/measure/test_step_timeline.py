"""Attribution of a trace's kernels to ops, on made-up traces."""

import pytest

from dsa_compile.measure.step.timeline import (
    OTHER,
    Work,
    launched,
    on_device,
    relabel,
    shares,
    split,
)


def span(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


EVENTS = [
    span("user_annotation", "moe: a", 0, 10),
    span("user_annotation", "moe: b", 12, 10),
    span("user_annotation", "something else", 0, 100),
    span("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=1),
    span("cuda_driver", "cuLaunchKernelEx", 14, 1, correlation=2),
    span("cuda_runtime", "cudaMemsetAsync", 30, 1, correlation=3),
    span("kernel", "k", 50, 5, correlation=1, grid=[3, 2, 1]),
    span("gpu_memset", "Memset", 70, 1, correlation=3),
    span("kernel", "k", 56, 8, correlation=2),
    {"ph": "M", "name": "process_name"},
]


def test_a_kernel_belongs_to_the_range_that_launched_it():
    found = launched(EVENTS, frozenset({"moe: a", "moe: b"}))
    assert [(w.label, w.name, w.start, w.end) for w in found] == [
        ("moe: a", "k", 50, 55),
        ("moe: b", "k", 56, 64),
        (OTHER, "Memset", 70, 71),
    ]
    assert [(w.span, w.blocks) for w in found] == [(0, 6), (1, 0), (-1, 0)]


def test_a_graph_is_labelled_by_the_order_of_equal_kernels():
    known = [Work("k", 0, 1, "a"), Work("l", 1, 2, "b"), Work("k", 2, 3, "c")]
    replayed = [Work("l", 0, 1), Work("k", 1, 2), Work("copy", 2, 3), Work("k", 3, 4)]
    assert [w.label for w in relabel(replayed, known)] == ["b", "a", OTHER, "c"]


def test_equal_kernels_of_two_streams_are_told_by_their_blocks():
    """Kernels of two streams may start in another order; names alone do where blocks differ."""
    known = [Work("k", 0, 1, "a", 0, 64), Work("k", 1, 2, "b", 1, 24)]
    replayed = [Work("k", 0, 1, blocks=24), Work("k", 1, 2, blocks=64)]
    assert [(w.label, w.span) for w in relabel(replayed, known)] == [("b", 1), ("a", 0)]
    other = [Work("k", 0, 1, blocks=24), Work("k", 1, 2, blocks=24)]
    assert [w.label for w in relabel(other, known)] == ["a", "b"]


def test_shares_and_gaps_add_up_to_the_step():
    """One that starts early and waits, one beside it on another stream, and a gap."""
    step = [
        Work("k", 0, 10, "a"),
        Work("m", 1, 9, "c"),  # hidden behind a
        Work("l", 2, 14, "b"),  # waits for a until 10
        Work("k", 16, 20, "a"),
    ]
    found, gaps = shares(step)
    assert {label: share.us for label, share in found.items()} == {"a": 14, "b": 4, "c": 0}
    assert gaps == 2
    assert sum(share.us for share in found.values()) + gaps == 20


def test_device_work_is_in_order_and_cut_into_steps():
    work = on_device(EVENTS)
    assert [w.start for w in work] == [50, 56, 70]
    assert [len(step) for step in split(work, 3)] == [1, 1, 1]
    with pytest.raises(ValueError, match="not 2 equal steps"):
        split(work, 2)
