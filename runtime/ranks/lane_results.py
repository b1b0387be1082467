"""Results of the steps of other lanes: sent by each lane's first rank, joined by the first of all.

Tokens that are chosen in their lane are sent when they are there. For other steps the logits are
sent, as only the first rank of all has what their tokens are chosen from.
"""

import os
import queue
import threading
from collections.abc import Sequence
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from dsa_compile.runtime.execution.model_runner import ModelRunner, OpenStep
from dsa_compile.runtime.execution.runner import LaunchedTokens, ReadTokens, StepTokens
from dsa_compile.runtime.ranks.messages import Failed, LaneLogits, LaneTokens
from dsa_compile.runtime.ranks.processes import RankProcess
from dsa_compile.runtime.scheduling.step import Failure

Message = TypeVar("Message", LaneTokens, LaneLogits)


class LaneAnswers:
    """Sends the results of a lane's steps from its first rank.

    Tokens are waited for by a thread, so that the next step is launched meanwhile.
    """

    def __init__(self, connection: "Connection[object, object]") -> None:
        self._connection = connection
        self._sending = threading.Lock()  # tokens of a step that was interrupted may still come
        self._launched: queue.SimpleQueue[tuple[int, LaunchedTokens]] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="tokens", daemon=True).start()

    def tokens(self, number: int, tokens: LaunchedTokens) -> None:
        """Send the tokens of a step when they are there."""
        self._launched.put((number, tokens))

    def logits(self, logits: LaneLogits) -> None:
        """Send the logits of a step."""
        self._send(logits)

    def _send(self, message: LaneLogits | LaneTokens | Failed) -> None:
        with self._sending:
            self._connection.send(message)

    def _send_all(self) -> None:
        try:
            while True:
                number, tokens = self._launched.get()
                self._send(LaneTokens(number, tokens.wait()))
        except OSError:
            os._exit(0)  # the first rank is gone
        except Exception as error:
            self._send(Failed(f"{type(error).__name__}: {error}".partition("\n")[0]))
            os._exit(1)


class LaneResults:
    """Receives the results of other lanes' steps.

    Args:
        heads: the first ranks of the lanes but this process's own, in order.
        timeout: seconds to wait for one.
    """

    def __init__(self, heads: Sequence[RankProcess], timeout: float) -> None:
        self._heads, self._timeout = tuple(heads), timeout

    def logits(self, own: LaneLogits) -> LaneLogits:
        """Join the logits of all lanes, and what comes with them, in the order of lanes.

        Raises:
            EOFError: a rank is gone.
            OSError: likewise, or it did not answer.
        """
        if not self._heads:
            return own
        others = [self._receive(head, own.number, LaneLogits) for head in self._heads]
        every = (own, *others)
        return LaneLogits(
            own.number,
            np.concatenate([lane.logits for lane in every]),
            [entry for lane in every for entry in lane.prompt],
            [drafts for lane in every for drafts in lane.drafts],
        )

    def joined(self, number: int, own: LaunchedTokens) -> LaunchedTokens:
        """The tokens of all lanes, as those of one step."""
        return ReadTokens(cache(partial(self._joined, number, own)), own.sample)

    def _joined(self, number: int, own: LaunchedTokens) -> StepTokens:
        others = (self._receive(head, number, LaneTokens).tokens for head in self._heads)
        results: list[Sequence[int] | Failure] = []
        for tokens in (own.wait(), *others):
            assert not tokens.logprobs, "requests that want more than a token run not ahead"
            results += tokens.results
        return StepTokens(results)

    def _receive(self, head: RankProcess, number: int, kind: type[Message]) -> Message:
        while True:
            message = head.receive(self._timeout)
            assert isinstance(message, LaneTokens | LaneLogits)
            if message.number == number:
                assert isinstance(message, kind)
                return message
            # Of a step that was interrupted before anybody could wait for it.
            assert message.number < number, "steps are waited for in their order"


def logits_of(runner: ModelRunner, step: OpenStep, number: int) -> LaneLogits:
    """Wait for a step of a lane up to its logits."""
    checked = step.checked()
    return LaneLogits(number, checked.logits.numpy(), runner.score(step), checked.drafts)
