"""Communication in a trace: how long collectives ran, and by how much they lengthened the steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsa_compile.measure.step.timeline import Work, lengthening

_NAMES = ("ncclDevKernel", "all_reduce", "all_gather", "reduce_scatter")
"""Prefixes of the names of collective kernels: NCCL's, and our own."""


@dataclass(frozen=True)
class Communication:
    """Collectives of one rank, per step.

    Attributes:
        step_us: microseconds from the first kernel of the trace to its last, gaps included.
        launches: kernels of collectives.
        us: microseconds in which each ran, added up; a kernel that waits for another rank runs.
        added_us: microseconds by which they lengthen the step: the critical path's part.
    """

    step_us: float
    launches: float
    us: float
    added_us: float

    @property
    def hidden_us(self) -> float:
        """Microseconds of collectives during which other kernels ran."""
        return self.us - self.added_us

    @property
    def share(self) -> float:
        """Share of the step that is nothing but communication."""
        return self.added_us / self.step_us if self.step_us else 0.0

    def __str__(self) -> str:
        return (
            f"{self.launches:.0f} collectives in a step of {self.step_us:.0f} us: {self.us:.0f} us,"
            f" {self.added_us:.0f} of them on the critical path ({self.share:.1%}), "
            f"{self.hidden_us:.0f} hidden"
        )


def communication(trace: Sequence[Work], steps: int) -> Communication:
    """Sum up a trace of equal steps.

    Args:
        trace: the work of one rank's device, in any order.
        steps: how many it has.
    """
    length = max((w.end for w in trace), default=0.0) - min((w.start for w in trace), default=0.0)
    found = [(w.end - w.start, added) for w, _, added in lengthening(trace) if _is_collective(w)]
    us, added = (sum(column) for column in zip(*found, strict=True)) if found else (0.0, 0.0)
    return Communication(length / steps, len(found) / steps, us / steps, added / steps)


def _is_collective(work: Work) -> bool:
    return work.name.startswith(_NAMES)
