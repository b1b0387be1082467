"""Processes of ranks: reports as they end, to the thread that waits and the one that watches."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import Layout
from dsa_compile.runtime import EngineOptions
from dsa_compile.runtime.execution.runner import ReadTokens, StepTokens
from dsa_compile.runtime.failures.step_errors import RankLost
from dsa_compile.runtime.ranks import watch
from dsa_compile.runtime.ranks.lane_results import LaneAnswers
from dsa_compile.runtime.ranks.messages import Failed, LaneLogits, LaneTokens, Start
from dsa_compile.runtime.ranks.processes import RankProcess, start_process
from dsa_compile.runtime.ranks.watch import Watch

REASON = "rank 1 (process 7) failed: out of memory"


class StubProcess:
    """Ends when it is looked at, at the latest."""

    pid = 7

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self._before = before

    def poll(self) -> int:
        self._before()
        self._before = lambda: None
        return 1

    def wait(self, timeout: float | None = None) -> int:
        return 1

    def kill(self) -> None: ...


@pytest.fixture
def ends() -> Iterator[tuple["Connection[object, object]", "Connection[object, object]"]]:
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


def test_a_reason_that_comes_just_before_the_end(ends) -> None:
    """Between a look at the connection and one at the process."""
    ours, theirs = ends
    process = StubProcess(lambda: theirs.send(Failed("out of memory")))
    assert RankProcess(1, process, ours).last_words() == REASON


def test_a_reason_is_there_for_both_threads(ends) -> None:
    ours, theirs = ends
    theirs.send(Failed("out of memory"))
    rank = RankProcess(1, StubProcess(), ours)
    assert rank.last_words() == rank.last_words() == REASON


class LateConnection:
    """A connection on which another thread is faster, once."""

    def __init__(self, connection: "Connection[object, object]") -> None:
        self._connection = connection
        self.meanwhile: Callable[[], object] | None = None

    def poll(self, timeout: float = 0.0) -> bool:
        found = self._connection.poll(timeout)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return found

    def recv(self) -> object:
        return self._connection.recv()


def test_a_message_that_the_other_thread_has_read(ends) -> None:
    """Between being told that there is one and reading it: nobody waits for the next."""
    ours, theirs = ends
    theirs.send("tokens of a step")
    late = LateConnection(ours)
    rank = RankProcess(1, StubProcess(), late)
    late.meanwhile = rank.last_words
    with pytest.raises(ConnectionError, match="closed by another rank"):
        rank.receive(60)


def test_whichever_thread_finds_a_rank_gone_while_loading(ends, monkeypatch) -> None:
    """The error is of one kind and has the reason, though the watch was faster."""
    monkeypatch.setattr(watch, "_watch", lambda *_: None)  # it looks when the test does
    ours, theirs = ends
    theirs.send(Failed("out of memory"))
    rank = RankProcess(1, StubProcess(), ours)
    watched = Watch([rank], lambda: None)

    def load() -> None:
        with watched.loading(60):
            watched.look()
            raise UserError(f"{rank.last_words()}, while the model was loaded")

    with pytest.raises(UserError, match="out of memory; all 2 ranks were ended"):
        load()


def test_a_rank_that_ends_while_nothing_runs_is_noticed(ends) -> None:
    ours, theirs = ends
    theirs.send(Failed("out of memory"))
    watched = Watch([RankProcess(1, StubProcess(), ours)], lambda: None)
    until = time.monotonic() + 60
    while watched._lost is None and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(RankLost, match="out of memory; all 2 ranks were ended"):
        watched.check()


def test_whoever_notices_a_lost_rank_is_not_kept_by_the_collectives(ends, monkeypatch) -> None:
    """NCCL ends after the CUDA graphs that hold collectives, which the noticing thread frees."""
    monkeypatch.setattr(watch, "_watch", lambda *_: None)
    freed, ended = threading.Event(), threading.Event()

    def abort() -> None:
        freed.wait(60)
        ended.set()

    watched = Watch([RankProcess(1, StubProcess(), ends[0])], abort)
    with pytest.raises(RankLost, match="all 2 ranks were ended"), watched.working():
        raise ConnectionError("closed")
    assert not ended.is_set()
    freed.set()
    watched.aborted(60)
    assert ended.is_set()


def test_ranks_that_were_told_to_end_are_not_missed(ends, monkeypatch) -> None:
    monkeypatch.setattr(watch, "_watch", lambda *_: None)
    watched = Watch([RankProcess(1, StubProcess(), ends[0])], lambda: None)
    watched.close()
    watched.look()
    watched.check()


def test_a_rank_that_loads_ends_with_the_first_one() -> None:
    """Waiting for addresses that nobody lists takes as long as a large model may load."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank = start_process(1)
    try:
        rank.connection.send(Start(1, Layout(tp=2), port, "artifact", "cpu", EngineOptions(), 1))
        assert rank.process.poll() is None
        rank.connection.close()
        assert rank.process.wait(120) == 1
    finally:
        rank.process.kill()
        rank.process.wait()


def test_a_lanes_messages_are_sent_one_at_a_time() -> None:
    """Tokens of a step that was interrupted may come while the next one's logits are sent."""
    sending, both = threading.Lock(), threading.Event()
    sent, clashes = [], []

    class Watched:
        def send(self, message: LaneTokens | LaneLogits) -> None:
            if not sending.acquire(blocking=False):
                clashes.append(message)
            elif message.number == 1:
                answers.tokens(2, ReadTokens(lambda: StepTokens([[5]])))
                both.wait(0.2)  # in which the other thread comes, if it is let in
                sending.release()
            sent.append(message.number)
            if len(sent) == 2:
                both.set()

    answers = LaneAnswers(Watched())
    answers.logits(LaneLogits(1, np.zeros((1, 4), np.float32)))
    assert both.wait(60)
    assert (sent, clashes) == ([1, 2], [])
