"""What the scheduler says of itself."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts at one moment; ``preemptions`` and ``prefix_hit_tokens`` are since the start.

    ``prefix_hit_tokens`` includes what preempted requests got back when they were admitted again.
    """

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    preemptions: int
    prefix_hit_tokens: int
