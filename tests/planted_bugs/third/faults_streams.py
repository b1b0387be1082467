"""Faults of streams, events and lifetimes."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="clocks-shared-between-tasks",
        about="what a task's stream knew is kept by reference, and so is what it learns later",
        file="passes/stream_schedule.py",
        old="known[task] = dict(clock)",
        new="known[task] = clock",
        kind="stream",
        culprit="overlap_streams",
        recipe="fp8",
        model="wide",
        target="sm_90a",
    ),
    Fault(
        id="current-stream-not-noted",
        about="events are recorded on the stream that was current before",
        file="runtime/execution/streams.py",
        old="        torch.cuda.set_stream(current)\n        self._current = current\n",
        new=(
            "        torch.cuda.set_stream(current)\n"
            "        self._current = self._current or current\n"
        ),
        kind="stream",
        culprit="streams",
        recipe="fp8",
        model="wide",
        target="sm_90a",
        hidden_by="debug_launches=True",
    ),
)
