"""A model on several ranks as a runner: this process is the first, and sends the others each step.

A step is one message to every rank, and then the same calls on all: collectives are where they
meet. The first rank of every lane but this process's own sends back the results of the lane's
requests. A step that fails on one rank cannot be undone on the others, so any failure ends the
group.

Lanes run a step of one shape (:mod:`dsa_compile.runtime.execution.step_shape`), as they meet in the
model, in first drafts, and at every depth of deeper ones: a lane without requests, or without
drafts, meets the others with idle rows. How many drafts of a request are right is the matter of its
lane alone. Where the host chooses the tokens of a request, it chooses those of all: every lane
sends its logits to the first rank, and gets its tokens before the next drafts are made.
"""

import contextlib
import ctypes
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch._C._distributed_c10d import Store

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import DP, Layout
from dsa_compile.ops.collectives import communicating
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.execution.runner import LaunchedTokens, ReadTokens, StepInputs, StepTokens
from dsa_compile.runtime.execution.step_shape import StepShape
from dsa_compile.runtime.failures.interrupts import Uninterrupted
from dsa_compile.runtime.failures.step_errors import RankLost
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.ranks.connect import GroupCommunicator, choose_device, connect
from dsa_compile.runtime.ranks.gloo import open_store
from dsa_compile.runtime.ranks.lane_results import LaneResults, logits_of
from dsa_compile.runtime.ranks.lanes import lane_steps
from dsa_compile.runtime.ranks.messages import ChosenTokens, Start, StepPlan
from dsa_compile.runtime.ranks.peers import LOADING_TIMEOUT, StorePeers
from dsa_compile.runtime.ranks.processes import (
    RankProcess,
    end_processes,
    kill_processes,
    start_process,
)
from dsa_compile.runtime.ranks.torchrun import join_ranks, open_shared_store
from dsa_compile.runtime.ranks.torchrun_environment import started_rank
from dsa_compile.runtime.ranks.watch import ABORTING_TIMEOUT, Watch
from dsa_compile.runtime.sampling.draw_options import records_of
from dsa_compile.runtime.sampling.host_choice import CheckedRows, Chosen, HostChoice
from dsa_compile.runtime.sampling.sampler import SamplingState
from dsa_compile.runtime.scheduling.stats import StepKind

_FORKED = (
    "this process was forked from the one that loaded the model on several ranks, which alone can "
    "run it; load it here, or use that process"
)


class RankGroup:
    """A :class:`~dsa_compile.runtime.execution.runner.Runner` over all ranks of a layout.

    Args:
        runner: this rank's.
        layout: of all ranks.
        others: the processes of the other ranks, all ready.
        communicator: connects this rank with them.
        watch: over this rank's waits for them.
        timeout: seconds that a step may wait for them.
        max_num_seqs: most requests of a lane.
    """

    def __init__(
        self,
        runner: ModelRunner,
        layout: Layout,
        others: Sequence[RankProcess],
        communicator: GroupCommunicator,
        watch: Watch,
        timeout: float,
        max_num_seqs: int,
    ) -> None:
        self._runner, self._layout = runner, layout
        self.num_lanes, self._max_num_seqs = layout.dp, max_num_seqs
        self._others = tuple(others)
        self._communicator = communicator
        self._watch, self._timeout = watch, timeout
        heads = [other for other in others if other.rank % layout.tp == 0]
        self._results = LaneResults(heads, timeout)
        self._number = 0  # of the newest step
        self.num_drafts = runner.num_drafts
        self.num_blocks, self.block_size = runner.num_blocks, runner.block_size
        self.vocab_size, self.max_model_len = runner.vocab_size, runner.max_model_len
        self.eos_token_ids, self.device = runner.eos_token_ids, runner.device
        self.rows_ahead, self.overlaps = runner.rows_ahead, runner.overlaps
        self.planned_bytes = runner.planned_bytes
        self.expert_counts = runner.expert_counts  # of all ranks' tokens
        # Also where nobody calls close(), and at the end of this process.
        self._pid = os.getpid()
        ending = (self._pid, runner, self._others, communicator, watch)
        self._end = weakref.finalize(self, _end, *ending)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the other ranks, in order."""
        return tuple(other.process.pid for other in self._others)

    @property
    def step_counts(self) -> Mapping[StepKind, int]:
        """Steps of this rank so far by how they ran; the others ran the same."""
        return self._runner.step_counts

    def samples_ahead(self, states: Sequence[SamplingState]) -> bool:
        """Whether every rank can choose these tokens for itself: of a request that looks back at
        its tokens, or wants more than a token, only the first rank knows enough."""
        return self._runner.samples_ahead(states) and not any(s.special for s in states)

    def launch(self, inputs: StepInputs) -> LaunchedTokens:
        """Run a step on all ranks.

        Raises:
            RankLost: a rank failed, ended or did not answer; the group is over.
        """
        if os.getpid() != self._pid:
            raise RankLost(_FORKED)
        # an interrupt in between would leave the ranks in different steps
        with Uninterrupted(), self._watch.working():
            self._number += 1
            return self._run(inputs, self._plans(inputs))

    def _run(self, inputs: StepInputs, plans: Sequence[StepPlan]) -> LaunchedTokens:
        """Send the plan of each lane to its ranks, and launch the step on this one."""
        with self._watch.waiting(self._timeout):  # one that hangs may take no more messages
            for other in self._others:
                other.connection.send(plans[self._layout.numbers(other.rank)[DP]])
        with communicating(self._communicator), self._device_wait():
            tokens = self._launch(inputs, plans)
        return ReadTokens(partial(self.wait, tokens), tokens.sample)

    def _plans(self, inputs: StepInputs) -> list[StepPlan]:
        """The step of each lane."""
        steps = [inputs]
        if self.num_lanes > 1:
            steps = lane_steps(inputs, self.num_lanes, self._max_num_seqs)
        shape = StepShape.of(steps) if len(steps) > 1 else None
        later = not self._runner.chooses_tokens(inputs)
        return [
            StepPlan(
                replace(step, states=()),
                records_of(step.rows, step.states, step.counts),
                later,
                shape,
                self._number,
            )
            for step in steps
        ]

    def _launch(self, inputs: StepInputs, plans: Sequence[StepPlan]) -> LaunchedTokens:
        """Launch a step on this rank, of whose plans the others have theirs."""
        own = plans[0]
        if not own.chosen_later:
            tokens = self._runner.launch_whole(own.inputs, own.options, own.shape)
            return self._results.joined(own.number, tokens)
        step = self._runner.open_step(own.inputs, own.options, own.shape)
        lanes = self._results.logits(logits_of(self._runner, step, own.number))
        checked = CheckedRows(torch.from_numpy(lanes.logits), lanes.drafts)
        choice = self._runner.choose(inputs, checked)
        if self._runner.drafter is not None:
            chosen = _by_lane(choice, plans)
            for other in self._others:
                lane = self._layout.numbers(other.rank)[DP]
                other.connection.send(ChosenTokens(*chosen[lane]))
            self._runner.close_step(step, chosen[0])
        known = choice.tokens(lanes.prompt)
        return ReadTokens(lambda: known)

    def wait(self, tokens: LaunchedTokens) -> StepTokens:
        """Wait for a step.

        Raises:
            RankLost: as :meth:`launch`.
        """
        with self._watch.working(), self._device_wait():
            return tokens.wait()

    def _device_wait(self) -> contextlib.AbstractContextManager[None]:
        """Limit on the wait for a step; none on a CPU, where each collective has its own."""
        if self.device.type == "cpu":
            return contextlib.nullcontext()
        return self._watch.waiting(self._timeout)

    def check(self) -> None:
        """Do nothing while all ranks are there; see :class:`Watched`.

        Raises:
            RankLost: one is gone, and so the group is over.
        """
        self._watch.check()

    def close(self) -> None:
        """End the other ranks; closing again does nothing."""
        self._end()


def _by_lane(choice: HostChoice, plans: Sequence[StepPlan]) -> list[Chosen]:
    """Tokens chosen for each lane, as wide as its own step."""
    ends = np.cumsum([0, *(len(plan.inputs.rows) for plan in plans)])
    return [
        (
            choice.sampled[start:end, : max(plan.inputs.max_new, default=1)],
            choice.kept[start:end],
        )
        for (start, end), plan in zip(pairwise(ends), plans, strict=True)
    ]


def _end(
    pid: int,
    runner: ModelRunner,
    others: Sequence[RankProcess],
    communicator: GroupCommunicator,
    watch: Watch,
) -> None:
    if os.getpid() != pid:  # a fork: the ranks are the first process's
        # Its destructor would wait for threads that a fork has not, so it may never run.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
        return
    watch.close()
    end_processes(others)
    runner.drop_graphs()  # they hold collectives, and NCCL ends after them
    if watch.whole:
        communicator.abort()
        communicator.close()
    else:  # a kernel may wait for a rank that is gone, and has the memory
        watch.aborted(ABORTING_TIMEOUT)


def load_ranks(path: Path | str, target: str, options: EngineOptions, layout: Layout) -> RankGroup:
    """Start the ranks of an artifact, or meet those that torchrun has started, and load it on all.

    Raises:
        ArtifactError: as :func:`load_runner`.
        UserError: likewise; or another rank could not load; or there are too few GPUs.
    """
    world = layout.world
    if layout.dp > 1:
        _check_lanes(path, options)
    choose_device(target, 0, world)
    store, others, port = _others(layout, str(path))
    peers = StorePeers(store, 0, world, lambda: _check(others))
    abort = close = _nothing
    watch: Watch | None = None
    try:
        # the first rank checks the files for all
        theirs = replace(options, verify="header", skip_tokenizer_init=True)
        where, threads = str(Path(path).absolute()), torch.get_num_threads()
        for other in others:
            start = Start(other.rank, layout, port, where, target, theirs, threads)
            with contextlib.suppress(OSError):  # it is gone; reported below
                other.connection.send(start)
        peers.least("processes", 0)
        communicator = connect(target, store, 0, layout, options)
        abort, close = communicator.abort, communicator.close
        watch = Watch(others, abort)
        with watch.loading(LOADING_TIMEOUT), communicating(communicator):
            runner = load_runner(path, options, peers)
            peers.least("loaded", 0)
    except BaseException:
        kill_processes(others)
        if watch is None or watch.whole:
            abort()
            close()
        raise
    return RankGroup(
        runner, layout, others, communicator, watch, options.rank_timeout, options.rows
    )


def _check_lanes(path: Path | str, options: EngineOptions) -> None:
    """Refuse what several lanes cannot do."""
    several = f"{path}: compiled with --dp for several lanes, whose steps are padded to one length"
    if options.deterministic:
        raise UserError(
            f"{several}; deterministic=True needs steps of the same shape: leave it out, or "
            "compile without --dp"
        )
    if options.mixed_graph_tokens:
        raise UserError(
            f"{several}; mixed_graph_tokens={options.mixed_graph_tokens!r}: only decode steps of "
            "theirs are captured so far: leave it out"
        )


def _others(layout: Layout, what: str) -> tuple[Store, list[RankProcess], int]:
    """The other ranks, started here or by torchrun, the table of addresses and its port."""
    if (started := started_rank()) is not None:
        shared = open_shared_store(started)
        return shared, join_ranks(started, shared, layout, what), 0
    store = open_store(layout.world, LOADING_TIMEOUT)
    return store, [start_process(rank) for rank in range(1, layout.world)], store.port


def _check(others: Sequence[RankProcess]) -> None:
    for other in others:
        if words := other.last_words():
            raise UserError(f"{words}, while the model was loaded")


def _nothing() -> None:
    """End nothing: there is nothing to end yet."""
