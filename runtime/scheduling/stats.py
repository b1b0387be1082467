"""Statistics of the scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class StepKind(NamedTuple):
    """Kind of a step, by how it ran.

    Attributes:
        graph: rows of the CUDA graph that was replayed, its tokens where prompts are among them
            (``"512 tokens"``), or ``eager``.
        variant: of the regions, ``long``, ``short`` or ``prompt``.
    """

    graph: str
    variant: str


EAGER = "eager"


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts at one moment; from ``preemptions`` on, since the start.

    ``prefix_hit_tokens`` includes what preempted requests got back when they were admitted again.
    ``memory_failures`` counts the steps that found no memory and were run in smaller parts: where
    it grows, steps need more memory than they were left. ``op_failures`` counts those that failed
    for other reasons and were run in parts. ``late_kernels`` counts the kernels that were compiled
    or loaded in this process after loading; each stalled a step, and there should be none. Kernels
    of other libraries (DeepGEMM) are not seen. ``step_counts`` has the steps by how they ran, and
    ``wait_seconds`` how long the host waited for their tokens: 0 of steps that are done when they
    are launched, as on a CPU. ``drafted`` counts the drafts that steps checked, by depth, the first
    draft of a request first, and ``accepted`` those that were right, or that ``force_accept`` kept
    if it is not None. ``acceptance_problem`` is a sentence while fewer are right than when the
    artifact was evaluated. ``lanes`` has the counts up to ``prefix_hit_tokens`` of each lane, where
    there are several; all others are of all lanes together. ``expert_tokens`` has the tokens of
    every routed expert by layer, where they are counted (``count_experts``); see :func:`busiest`.
    """

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    owned_blocks: int
    preemptions: int
    prefix_hit_tokens: int
    memory_failures: int = 0
    op_failures: int = 0
    late_kernels: int = 0
    step_counts: Mapping[StepKind, int] = field(default_factory=dict)
    wait_seconds: float = 0.0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    force_accept: float | None = None
    acceptance_problem: str = ""
    lanes: tuple["SchedulerStats", ...] = ()
    expert_tokens: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def accepted_length(self) -> float:
        """Tokens a request got of a step that checked drafts, on average; 1 without any."""
        return 1 + sum(self.accepted) / self.drafted[0] if self.drafted else 1.0


class Busiest(NamedTuple):
    """The one of several that gets the most tokens.

    Attributes:
        number: which one.
        times_average: its tokens over those of an average one; 1.0 where there are none.
    """

    number: int
    times_average: float


def busiest(tokens: Sequence[int], ranks: int | None = None) -> Busiest:
    """The busiest expert of a layer, or the busiest rank where experts lie on several.

    Args:
        tokens: of every expert.
        ranks: that hold whole experts, an equal number each, those with the lowest numbers on the
            first rank. None for the experts themselves.
    """
    own = 1 if ranks is None else len(tokens) // ranks
    sums = [sum(tokens[start : start + own]) for start in range(0, len(tokens), own)]
    most, total = max(sums), sum(sums)
    return Busiest(sums.index(most), most * len(sums) / total if total else 1.0)
