"""A generation request as the scheduler sees it: its tokens and how far they are computed."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Protocol

import numpy as np

from dsa_compile.runtime.pages.tiers import PrefixNode
from dsa_compile.runtime.requests.outputs import FinishReason

UNKNOWN_TOKEN = -1


class Status(Enum):
    """State of a request, from waiting to finished."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class StopCondition(Protocol):
    """Decides, token by token, when a request ends."""

    def append(self, token_id: int) -> FinishReason | None:
        """Take a generated token; the reason if the request ends with it."""
        ...


class Request:
    """Tokens, cache blocks and progress of one request; only the scheduler changes them.

    Positions are counted from the first prompt token. ``num_computed`` of them are in the cache for
    certain; ``num_scheduled >= num_computed`` counts those of steps in flight as well, drafts
    included: what a step does not yield is taken off again when it is committed. A preempted
    request goes back to 0 computed tokens and keeps its generated ones.

    Args:
        request_id: unique among unfinished requests.
        prompt: at least one token id.
        max_tokens: most tokens to generate, >= 1.
        stop_condition: decides when the request ends; must end it by ``max_tokens`` tokens.
        priority: lower runs first; equal priorities run in order of arrival.
        cache_salt: cache blocks are shared with requests of the same salt alone; None is one too.
        all_logits: logits of all prompt tokens are wanted, so none of their cache rows are reused
            before these are there.
    """

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        stop_condition: StopCondition,
        priority: int = 0,
        cache_salt: str | None = None,
        all_logits: bool = False,
    ) -> None:
        self.request_id = request_id
        self.cache_salt = None if cache_salt is None else cache_salt.encode()
        self.prompt_len = len(prompt)
        self.max_tokens = max_tokens
        self.stop_condition = stop_condition
        self.priority = priority
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.rank = (priority, 0)  # the scheduler fills in the order of arrival

        # token_ids[:num_tokens] are known; steps in flight yield num_pending more at the most.
        self.token_ids = np.array(prompt, np.int64)
        self.num_tokens = self.prompt_len
        self.num_pending = 0
        # The last token max_tokens allows is returned, never fed back.
        self.num_computable = self.prompt_len + max_tokens - 1

        # The first prompt position whose logits are still to be computed, the last one aside.
        self.logits_from = 0 if all_logits else self.prompt_len - 1

        self.num_computed = 0
        self.num_scheduled = 0
        self.blocks: list[int] = []
        self.row = -1  # of the block table, while it holds blocks
        # The first num_registered blocks are in the tree of prefixes, the last of them at node;
        # None when there is no tree to register with.
        self.node: PrefixNode | None = None
        self.num_registered = 0

        self.cached_tokens = 0  # prompt tokens reused at the first admission
        self.num_preemptions = 0
        self.scheduled_at: float | None = None  # seconds of time.perf_counter, first admission

    def reserve_output(self) -> None:
        """Make room for the generated tokens, once the request is known to fit the limits."""
        output = np.full(self.max_tokens, UNKNOWN_TOKEN, np.int64)
        self.token_ids = np.concatenate([self.token_ids, output])

    def commit(self, count: int, max_new: int, tokens: Sequence[int]) -> FinishReason | None:
        """Take what the oldest step in flight made of this request.

        Args:
            count: tokens it computed.
            max_new: tokens it could yield.
            tokens: those it yielded; ones behind a token that ends the request are ignored.

        Returns:
            The reason if the request ends with them.
        """
        reason = None
        if max_new:
            assert 0 < len(tokens) <= max_new, (len(tokens), max_new)
            end = self.num_tokens
            for token in tokens:
                self.token_ids[end] = token
                end += 1
                reason = self.stop_condition.append(token)
                if reason is not None:
                    break
            dropped = max_new - (end - self.num_tokens)
            self.num_tokens = end
            self.num_pending -= max_new
            if dropped:
                self.num_scheduled -= dropped
                count -= dropped
        self.num_computed += count
        if self.logits_from < self.prompt_len - 1:
            computed = min(self.num_computed, self.prompt_len - 1)
            self.logits_from = max(self.logits_from, computed)
        return reason

    @property
    def in_flight(self) -> bool:
        """Whether a step that is not committed computes tokens of this request."""
        return self.num_scheduled > self.num_computed

    @property
    def num_to_compute(self) -> int:
        """Tokens, known or in flight, that no step computes yet; 1 where the last one is left."""
        count = self.num_tokens + self.num_pending
        return (count if count < self.num_computable else self.num_computable) - self.num_scheduled

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens."""
        ids: list[int] = self.token_ids[self.prompt_len : self.num_tokens].tolist()
        return ids
