"""Faults of streams, events and lifetimes."""

from dataclasses import replace
from typing import Any

from tests.planted_bugs.changes import called, given
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import Plant, here, inserting, result, wrap

SWITCH = "runtime.execution.streams.StreamSwitch."
SM90 = {"where": "stream", "target": "sm_90a"}
BF16 = {**SM90, "model": "wide", "recipe": "bf16"}
FP8 = {**SM90, "model": "wide", "recipe": "fp8"}
THREE = {**SM90, "model": "three", "recipe": "fp8"}


def waits(late: int = 0, shared: bool = False) -> Plant:
    """The planner of waits again, wrong: a clock too late, or clocks that are shared."""

    def found(whole: Any, tasks: Any, order: Any, streams: Any) -> dict[int, list[int]]:
        known: dict[int, dict[int, int]] = {}
        clocks: dict[int, dict[int, int]] = {}
        ticks: dict[int, int] = {}
        needed: dict[int, list[int]] = {}
        for task in order:
            clock = clocks.setdefault(streams[task], {})
            foreign = [t for t in tasks[task].after if streams[t] != streams[task]]
            for other in sorted(foreign, key=order.index, reverse=True):
                if clock.get(streams[other], 0) < ticks[other] - late:
                    needed.setdefault(task, []).append(other)
                    for stream, tick in known[other].items():
                        clock[stream] = max(clock.get(stream, 0), tick)
            ticks[task] = clock[streams[task]] = clock.get(streams[task], 0) + 1
            known[task] = clock if shared else dict(clock)
        return needed

    return wrap("passes.stream_schedule.waits", found)


def on_main(method: str) -> Plant:
    """A method of the switch takes the main stream for the current one."""

    def run(whole: Any, switch: Any, event: int) -> None:
        current, switch._current = switch._current, switch._main
        whole(switch, event)
        switch._current = current

    return wrap(SWITCH + method, run)


def recorded_once(whole: Any, switch: Any, event: int) -> None:
    if event not in switch._events:
        whole(switch, event)


def not_noted(whole: Any, switch: Any, stream: int) -> None:
    before = switch._current
    whole(switch, stream)
    switch._current = before or switch._current


def without_one(needed: dict[int, Any], *_: Any) -> dict[int, Any]:
    last = max(needed)
    return {task: others for task, others in needed.items() if task != last}


def recorded_early(_: None, edit: Any, *rest: Any) -> None:
    for node in [n for n in edit.graph.nodes if str(n.target) == "dsa.record_event.default"]:
        node.prev.prepend(node)


def first_call_pinned(tasks: Any, *_: Any) -> Any:
    return [tasks[0], replace(tasks[1], pinned=True), *tasks[2:]]


FAULTS = (
    Fault("nothing-held", "tensors that another stream reads are not held",
          wrap("passes.overlap_streams._hold", lambda whole, edit: None), "overlap_streams",
          **THREE),
    Fault("held-to-the-first-call", "tensors are held to the next call of their stream alone",
          here("passes.overlap_streams.early_frees", lambda whole, *args: ((storage, home,
             replace(use, tick=0), reuse) for storage, home, use, reuse in whole(*args))),
          "overlap_streams", **BF16),
    Fault("missing-wait", "one call does not wait for another stream",
          result("passes.stream_schedule.waits", without_one), "overlap_streams", **THREE),
    Fault("waits-one-tick-late", "a wait is left out where the stream knows the call before",
          waits(late=1), "overlap_streams", **BF16),
    Fault("clocks-shared-between-tasks", "what a stream knew is kept by reference",
          waits(shared=True), "overlap_streams", **FP8),
    Fault("waits-for-another-event", "MoE layers wait for event 0, whichever is meant",
          inserting("overlap_streams", "dsa.wait_event", given(0, 0), region="moe"),
          "overlap_streams", **THREE),
    Fault("wait-and-record-exchanged", "dense layers record where they are to wait",
          inserting("overlap_streams", "dsa.wait_event", called("dsa.record_event"),
             region="dense"), "overlap_streams", **THREE),
    Fault("event-before-its-call", "an event is recorded before the call that it stands for",
          result("passes.overlap_streams._emit", recorded_early), "overlap_streams", **BF16,
          echo="cms-sw/cmssw#34725"),
    Fault("event-recorded-once", "an event is recorded by the first call of a region alone",
          wrap(SWITCH + "_record_event", recorded_once), "streams", **BF16,
          hidden_by="debug_launches=True", echo="cms-sw/cmssw#34725"),
    Fault("recorded-on-main", "events are recorded on stream 0",
          on_main("_record_event"), "streams", **BF16, hidden_by="debug_launches=True"),
    Fault("main-stream-waits", "stream 0 waits for an event instead of the side stream",
          on_main("_wait_event"), "streams", **FP8, hidden_by="debug_launches=True"),
    Fault("current-stream-not-noted", "events are recorded on the stream that was current before",
          wrap(SWITCH + "_on_stream", not_noted), "streams", **FP8,
          hidden_by="debug_launches=True"),
    Fault("control-first-call-pinned", "every region's first call stays on stream 0",
          result("passes.overlap_streams.region_tasks", first_call_pinned), **BF16),
)  # fmt: skip
