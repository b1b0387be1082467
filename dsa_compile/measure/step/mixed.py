"""Mixed steps to time, and what a prompt's chunk and decoding requests cost each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from dsa_compile.measure.step.cases import Case, Decode, Mixed
from dsa_compile.measure.step.run import Row


def mixed_cases(
    batches: Sequence[int], contexts: Sequence[int], chunks: Sequence[int]
) -> list[Mixed]:
    """Mixed cases of each chunk that a context holds: alone and beside each batch, graph or not.

    Args:
        batches: of decoding requests; those of one are left out.
        contexts: of every request.
        chunks: tokens.
    """
    cases = []
    for context in contexts:
        for chunk in (size for size in chunks if size <= context):
            for batch in (0, *(size for size in batches if size > 1)):
                cases += [Mixed(batch, context, chunk), Mixed(batch, context, chunk, False)]
    return cases


@dataclass(frozen=True)
class Company:
    """Time of a mixed step against its parts; milliseconds of a step with all layers.

    Attributes:
        case: label of the mixed step.
        together: GPU time of it.
        apart: of the decode step and of the chunk alone, added.
        wall: of mixed steps that follow one another, each waited for.
    """

    case: str
    together: float
    apart: float
    wall: float


def company(cases: Sequence[Case], rows: Sequence[Row]) -> list[Company]:
    """Each mixed step whose parts were timed in the same run, too.

    Args:
        cases: of the run.
        rows: of each.
    """
    times = dict(zip(cases, rows, strict=True))
    found = []
    for case, row in times.items():
        if isinstance(case, Mixed) and case.batch:
            decode = times.get(Decode(case.batch, case.context))
            chunk = times.get(Mixed(0, case.context, case.chunk, case.captured))
            if decode is not None and chunk is not None:
                apart = decode.step + chunk.step
                found.append(Company(row.case, row.step, apart, row.wall))
    return found


def company_table(found: Sequence[Company]) -> Table:
    """A row a mixed step."""
    table = Table(title="Decoding and a prompt's chunk in one step", box=None, pad_edge=False)
    for head in ("", "step ms", "decode + chunk ms", "ratio", "wall ms"):
        table.add_column(head, justify="right" if head else "left", no_wrap=bool(head))
    for each in found:
        cells = (f"{each.together:.3f}", f"{each.apart:.3f}", f"{each.together / each.apart:.2f}")
        table.add_row(each.case, *cells, f"{each.wall:.3f}")
    return table
