"""Faults of streams, events and lifetimes."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="nothing-held",
        about="tensors that another stream reads are not held",
        file="passes/overlap_streams.py",
        old=("    _emit(edit, list(memory.uses), tasks, plan)\n    _hold(edit)"),
        new="    _emit(edit, list(memory.uses), tasks, plan)",
        kind="stream",
        culprit="overlap_streams",
        recipe="fp8",
        model="wide",
        target="sm_90a",
    ),
    Fault(
        id="waits-one-tick-late",
        about="a wait is left out where the stream knows the call before",
        file="passes/stream_schedule.py",
        old="if clock.get(streams[other], 0) < ticks[other]:",
        new="if clock.get(streams[other], 0) < ticks[other] - 1:",
        kind="stream",
        culprit="overlap_streams",
        recipe="bf16",
        model="wide",
        target="sm_90a",
    ),
    Fault(
        id="event-recorded-once",
        about="an event is recorded by the first call of a region alone",
        file="runtime/execution/streams.py",
        old=(
            "            found = self._events[event] = torch.cuda.Event()\n"
            "        found.record(self._current)"
        ),
        new=(
            "            found = self._events[event] = torch.cuda.Event()\n"
            "            found.record(self._current)"
        ),
        kind="stream",
        culprit="streams",
        recipe="bf16",
        model="wide",
        target="sm_90a",
        hidden_by="debug_launches=True",
        echo="cms-sw/cmssw#34725",
    ),
    Fault(
        id="recorded-on-main",
        about="events are recorded on stream 0",
        file="runtime/execution/streams.py",
        old="found.record(self._current)",
        new="found.record(self._main)",
        kind="stream",
        culprit="streams",
        recipe="bf16",
        model="wide",
        target="sm_90a",
        hidden_by="debug_launches=True",
    ),
    Fault(
        id="held-to-the-first-call",
        about="tensors are held to the first call of their stream behind the use",
        file="passes/overlap_streams.py",
        old=("after = (m for m in time.of_stream(home) if m.index > use.index and m.follows(use))"),
        new="after = (m for m in time.of_stream(home) if m.index > use.index)",
        kind="stream",
        culprit="overlap_streams",
        recipe="bf16",
        model="wide",
        target="sm_90a",
    ),
    Fault(
        id="control-last-call-pinned",
        about="every stream's first call stays on stream 0",
        file="passes/overlap_streams.py",
        old="pinned = not memory.results.isdisjoint(memory.uses[node].makes)",
        new=("pinned = len(tasks) == 1 or not memory.results.isdisjoint(memory.uses[node].makes)"),
        kind="stream",
        culprit="",
        recipe="bf16",
        model="wide",
        target="sm_90a",
        control=True,
    ),
    Fault(
        id="event-before-its-call",
        about="an event is recorded before the call that it stands for",
        file="passes/overlap_streams.py",
        old=(
            "        if 1 <= task <= len(calls):\n"
            "            move(calls[task - 1])\n"
            "        if task in events:\n"
            '            edit.call(RECORD_EVENT, events[task], before=end, path="")\n'
        ),
        new=(
            "        if task in events:\n"
            '            edit.call(RECORD_EVENT, events[task], before=end, path="")\n'
            "        if 1 <= task <= len(calls):\n"
            "            move(calls[task - 1])\n"
        ),
        kind="stream",
        culprit="overlap_streams",
        recipe="bf16",
        model="wide",
        target="sm_90a",
        echo="cms-sw/cmssw#34725",
    ),
    Fault(
        id="event-knows-the-future",
        about="an event shares its stream's clock",
        file="dsa_compile/ir/streams.py",
        old="Recorded(node, stream, self._last.get(stream), dict(clock))",
        new="Recorded(node, stream, self._last.get(stream), clock)",
        kind="stream",
        culprit="overlap_streams",
        recipe="bf16",
        model="wide",
        target="sm_90a",
    ),
    Fault(
        id="foreign-reads-not-seen",
        about="memory that another stream only reads may be given out again",
        file="dsa_compile/ir/hazards_streams.py",
        old="for storage in uses.touches():\n            users",
        new="for storage in uses.writes:\n            users",
        kind="stream",
        culprit="overlap_streams",
        recipe="bf16",
        model="wide",
        target="sm_90a",
    ),
    Fault(
        id="main-stream-waits",
        about="stream 0 waits for an event instead of the side stream",
        file="runtime/execution/streams.py",
        old="self._events[event].wait(self._current)",
        new="self._events[event].wait(self._main)",
        kind="stream",
        culprit="streams",
        recipe="fp8",
        model="wide",
        target="sm_90a",
        hidden_by="debug_launches=True",
    ),
)
