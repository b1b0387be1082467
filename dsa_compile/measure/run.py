"""Running the suites: every candidate is checked, then those that are right are timed."""

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from dsa_compile.measure.case import Case, Plan, is_ours
from dsa_compile.measure.lock import exclusive, shared
from dsa_compile.measure.timing import Ceilings, graph_median


@dataclass
class Row:
    """One candidate of one case.

    Args:
        op: as in the plan.
        shape: as in the plan.
        provider: whose kernel.
        us: median microseconds, or None if it was not timed.
        limit_us: what the machine's measured ceilings allow.
        problem: why it was not timed.
        family: as in the plan.
        ran: False if the provider is not to be had here.
        bytes: as in the case.
        flops: as in the case.
    """

    op: str
    shape: str
    provider: str
    us: float | None
    limit_us: float
    problem: str | None = None
    family: str = ""
    ran: bool = True
    bytes: float = 0.0
    flops: float = 0.0

    @property
    def case(self) -> str:
        """Shape and family."""
        return f"{self.shape} {self.family}".rstrip()


def run_plans(
    plans: Iterable[Plan],
    ceilings: Ceilings,
    wanted: Callable[[str], bool] = lambda provider: True,
    timed: bool = True,
) -> Iterator[list[Row]]:
    """Rows of each plan, as they come.

    Args:
        plans: what to measure.
        ceilings: of this machine.
        wanted: which providers to take.
        timed: False to check only.
    """
    for plan in plans:
        try:
            with shared():
                case = plan.make()
        except Exception as error:
            yield [Row(plan.op, plan.shape, "-", None, 0.0, _brief(error), plan.family)]
            continue
        yield [
            _measure(plan, case, name, ceilings, timed) for name in case.candidates if wanted(name)
        ] + [
            Row(plan.op, plan.shape, name, None, 0.0, why, plan.family, False)
            for name, why in case.unavailable.items()
        ]
        del case
        gc.collect()
        torch.cuda.empty_cache()


def _measure(plan: Plan, case: Case, provider: str, ceilings: Ceilings, timed: bool) -> Row:
    limit = ceilings.limit_us(case.bytes, case.flops, case.math)
    row = Row(
        plan.op,
        plan.shape,
        provider,
        None,
        limit,
        family=plan.family,
        bytes=case.bytes,
        flops=case.flops,
    )
    calls = case.candidates[provider]
    try:
        with shared():
            row.problem = case.check(calls[0]())
            torch.cuda.synchronize()
        if row.problem is None and timed:
            with exclusive():
                row.us = graph_median(calls)
    except Exception as error:
        row.problem = _brief(error)
    return row


def best_peer(rows: Iterable[Row]) -> float | None:
    """Microseconds of the fastest peer of one case."""
    times = [row.us for row in rows if row.us is not None and not is_ours(row.provider)]
    return min(times, default=None)


def _brief(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {text} ({last.filename.rpartition('/')[2]}:{last.lineno})"
