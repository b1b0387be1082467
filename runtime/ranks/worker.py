"""A rank but the first: a process that loads its part of a model and runs the steps it is sent.

It ends when the first rank says so or is gone, and when a step fails: then with a message that says
why, if the first rank can still read it.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch
from torch._C._distributed_c10d import Store

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import DP, TP, Layout
from dsa_compile.ops.collectives import communicating
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.ranks.connect import choose_device, connect
from dsa_compile.runtime.ranks.gloo import join_store
from dsa_compile.runtime.ranks.lane_results import LaneAnswers, logits_of
from dsa_compile.runtime.ranks.messages import ChosenTokens, Failed, Start, StepPlan
from dsa_compile.runtime.ranks.peers import LOADING_TIMEOUT, StorePeers

_POLL = 0.5  # seconds between looks at steps that still run


class UnfinishedSteps:
    """The steps that were launched on this process's GPU and may still run.

    Args:
        timeout: seconds that a step may take.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._steps: deque[tuple[torch.cuda.Event, float]] = deque()

    def launched(self) -> None:
        """Take note of what was just launched on the current stream."""
        event = torch.cuda.Event()
        event.record()
        self._steps.append((event, time.monotonic()))

    def any(self) -> bool:
        """Whether a step still runs.

        Raises:
            TimeoutError: for longer than it may.
            RuntimeError: the GPU failed.
        """
        while self._steps and self._steps[0][0].query():
            self._steps.popleft()
        if self._steps and time.monotonic() - self._steps[0][1] > self._timeout:
            raise TimeoutError(f"the step timed out after {self._timeout:g} s")
        return bool(self._steps)


def serve_rank(connection: "Connection[object, object]", store: Store | None = None) -> int:
    """Run a rank.

    Args:
        connection: to the first rank.
        store: the table of addresses; None for the one that the first rank has opened.

    Returns:
        0 when the first rank has closed its engine, 1 when it is gone, and after an error.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank decides what an interrupt ends
    try:
        _serve(connection, store)
    except (EOFError, ConnectionError):
        return 1
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            connection.send(Failed(text.partition("\n")[0]))
        return 1
    return 0


def _serve(connection: "Connection[object, object]", store: Store | None) -> None:
    start = connection.recv()
    assert isinstance(start, Start)
    torch.set_num_threads(start.num_threads)
    layout = start.layout
    choose_device(start.target, start.rank, layout.world)
    with contextlib.ExitStack() as entered:
        with _ended_with_first_rank(connection):
            if store is None:
                store = join_store(start.port, layout.world, LOADING_TIMEOUT)
            peers = StorePeers(store, start.rank, layout.world)
            peers.least("processes", 0)
            communicator = connect(start.target, store, start.rank, layout, start.options)
            entered.enter_context(communicating(communicator))
            runner = load_runner(start.path, start.options, peers)
            peers.least("loaded", 0)
        follow_steps(runner, layout, start.rank, connection, start.options.rank_timeout)


@contextlib.contextmanager
def _ended_with_first_rank(connection: "Connection[object, object]") -> Iterator[None]:
    """End this process if the first rank is gone meanwhile.

    What a rank waits for while it loads, such as the table of addresses, says nothing for as long
    as loading may take. Afterwards it waits for steps, over the connection itself.
    """
    done = threading.Event()
    socket = select.poll()
    socket.register(connection.fileno(), select.POLLRDHUP)

    def watch() -> None:
        while not done.is_set():
            if socket.poll(1000 * _POLL) and not done.is_set():
                os._exit(1)

    threading.Thread(target=watch, name="first rank", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def follow_steps(
    runner: ModelRunner,
    layout: Layout,
    rank: int,
    connection: "Connection[object, object]",
    timeout: float,
) -> None:
    """Run the steps that the first rank sends, until it closes its engine.

    Args:
        runner: of this rank; the caller chooses what its collectives meet by
            (:func:`~dsa_compile.ops.collectives.communicating`).
        layout: of all ranks.
        rank: the number of this one, from 1.
        connection: to the first rank.
        timeout: seconds that a step may take on a GPU.

    Raises:
        EOFError: the first rank is gone.
    """
    numbers = layout.numbers(rank)
    answers = LaneAnswers(connection) if numbers[DP] and not numbers[TP] else None
    unfinished = UnfinishedSteps(timeout)
    while (plan := _next_plan(connection, unfinished)) is not None:
        _follow(runner, plan, answers, connection.recv)
        if runner.device.type == "cuda":
            unfinished.launched()


def _next_plan(
    connection: "Connection[object, object]", unfinished: UnfinishedSteps
) -> StepPlan | None:
    """The next step; None when the first rank has closed its engine."""
    while unfinished.any() and not connection.poll(_POLL):
        pass
    plan = connection.recv()
    assert plan is None or isinstance(plan, StepPlan)
    return plan


def _follow(
    runner: ModelRunner,
    plan: StepPlan,
    answers: LaneAnswers | None,
    receive: Callable[[], object],
) -> None:
    """Run a step; its results go to the first rank of all from another lane's first one."""
    if not plan.chosen_later:
        tokens = runner.launch_whole(plan.inputs, plan.options, plan.shape)
        if answers is not None:
            answers.tokens(plan.number, tokens)
        return
    step = runner.open_step(plan.inputs, plan.options, plan.shape)
    if answers is None:
        runner.score(step)  # its lane's ranks meet there
    else:
        answers.logits(logits_of(runner, step, plan.number))
    if runner.drafter is not None:
        message = receive()
        assert isinstance(message, ChosenTokens)
        runner.close_step(step, (message.sampled, message.kept))


if __name__ == "__main__":
    status = serve_rank(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a GPU that waits for other ranks would keep the process from ending
