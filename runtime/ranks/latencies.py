"""Measured times of collectives, and what follows from them for sizes and ranks in between.

A table is a JSON file with the measurements of one machine or several; ``dsa-bench collectives
--json`` prints one. A size between two measured ones takes what lies on the line between them, a
larger one goes on at the bandwidth of the two largest, a smaller one takes as long as the smallest.
A number of ranks between two measured ones lies on the line over its logarithm. Beyond the measured
numbers a rank exchanges with each of the others: *n* ranks take as long as the *m* that were
measured take for ``(n - 1) / (m - 1)`` times the bytes.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsa_compile.errors import UserError
from dsa_compile.kernels.peer_limits import CAPACITY, most_summed, norms_with_sum

TABLE = Path(__file__).with_name("latencies.json")
"""The measurements that come with the package."""

NCCL, SYMMETRIC = "nccl", "symmetric"
NORMED = "all_reduce_add_rms_norm_quantize"


@dataclass(frozen=True)
class Latency:
    """One measurement.

    Attributes:
        op: the collective, such as ``all_reduce``.
        provider: whose, such as ``nccl``.
        ranks: GPUs that met.
        nbytes: of each rank's operand.
        us: microseconds of a call among others in a CUDA graph.
    """

    op: str
    provider: str
    ranks: int
    nbytes: int
    us: float


@dataclass(frozen=True)
class Estimate:
    """Measured time of a collective.

    Attributes:
        us: microseconds.
        provider: whose measurements it follows from.
        basis: ``measured`` of as many ranks, or ``interpolated`` or ``extrapolated`` from others.
    """

    us: float
    provider: str
    basis: str


class LatencyTable:
    """Measurements, and estimates between them."""

    def __init__(self, entries: Sequence[Latency]) -> None:
        self.entries = tuple(entries)
        self._curves: dict[tuple[str, str], dict[int, list[tuple[int, float]]]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.nbytes):
            curves = self._curves.setdefault((entry.op, entry.provider), {})
            curves.setdefault(entry.ranks, []).append((entry.nbytes, entry.us))

    @property
    def providers(self) -> tuple[str, ...]:
        """All that were measured."""
        return tuple(dict.fromkeys(entry.provider for entry in self.entries))

    def require_providers(self, names: Iterable[str]) -> None:
        """Raise UserError for a name that is no provider's."""
        for name in names:
            if name not in self.providers:
                raise UserError(
                    f"collectives of {name!r} were not measured; the table has "
                    + ", ".join(self.providers)
                )

    def estimate(self, op: str, provider: str, ranks: int, nbytes: int) -> Estimate | None:
        """Time of a call of a provider, or None if the provider was not measured at all.

        Args:
            op: the collective.
            provider: whose.
            ranks: GPUs that meet.
            nbytes: of each rank's operand.
        """
        curves = self._curves.get((op, provider))
        if curves is None:
            return None
        if ranks in curves:
            return Estimate(_at(curves[ranks], nbytes), provider, "measured")
        fewer = max((n for n in curves if n < ranks), default=None)
        more = min((n for n in curves if n > ranks), default=None)
        if fewer is not None and more is not None:
            share = math.log(ranks / fewer) / math.log(more / fewer)
            low, high = _at(curves[fewer], nbytes), _at(curves[more], nbytes)
            return Estimate(low + share * (high - low), provider, "interpolated")
        nearest = fewer or more
        assert nearest is not None, "a curve has points"
        scaled = nbytes * (ranks - 1) / (nearest - 1)
        return Estimate(_at(curves[nearest], scaled), provider, "extrapolated")

    def lookup(self, op: str, provider: str, ranks: int, nbytes: int) -> Estimate | None:
        """Time of a collective in an engine that runs a provider's.

        NCCL runs what the provider lacks or, as our own kernels do for large sizes, leaves to it.
        Arguments are those of :meth:`estimate`; None if neither was measured.
        """
        of_a_rank = nbytes // ranks if op == "reduce_scatter" else nbytes
        most = most_summed(ranks) if op == "all_reduce" else CAPACITY
        if provider == SYMMETRIC and of_a_rank > most:
            provider = NCCL
        return self.estimate(op, provider, ranks, nbytes) or self.estimate(op, NCCL, ranks, nbytes)

    def lookup_normed(self, provider: str, ranks: int, nbytes: int) -> Estimate | None:
        """Time of a sum with the norm behind it, or None where they are two launches.

        Arguments are those of :meth:`estimate`.
        """
        few = nbytes <= CAPACITY and norms_with_sum(ranks, nbytes)
        if provider != SYMMETRIC or not few:
            return None
        return self.estimate(NORMED, provider, ranks, nbytes)


def _at(curve: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Microseconds on a curve of sizes, which are in order."""
    if nbytes <= curve[0][0] or len(curve) == 1:
        return curve[0][1] * max(1.0, nbytes / curve[0][0] if len(curve) == 1 else 1.0)
    after = next((i for i, (size, _) in enumerate(curve) if size >= nbytes), len(curve) - 1)
    (size, us), (larger, more) = curve[after - 1], curve[after]
    return us + (more - us) * (nbytes - size) / (larger - size)


def read_latencies(path: Path | str | None = None) -> LatencyTable:
    """The measurements that come with the package, or better ones.

    Args:
        path: of a JSON file whose measurements of an op, a provider and a number of ranks stand in
            for the package's; None for none.

    Raises:
        UserError: it is no such file.
    """
    entries = _entries(TABLE)
    if path is not None:
        given = _entries(Path(path))
        known = {(entry.op, entry.provider, entry.ranks) for entry in given}
        others = (e for e in entries if (e.op, e.provider, e.ranks) not in known)
        entries = [*given, *others]
    return LatencyTable(entries)


def _entries(path: Path) -> list[Latency]:
    try:
        machines = json.loads(path.read_text(encoding="utf-8"))["machines"]
        entries = [_entry(row) for machine in machines for row in machine["entries"]]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: no table of collectives' latencies ({type(error).__name__}: {error}); make "
            "one with dsa-bench collectives --table FILE"
        ) from None
    if not entries:
        raise UserError(f"{path}: it has no measurement")
    return entries


def _entry(row: Any) -> Latency:
    entry = Latency(row["op"], row["provider"], row["ranks"], row["bytes"], row["us"])
    numbers = (entry.ranks, entry.nbytes)
    if any(type(number) is not int or number < 1 for number in numbers) or entry.ranks < 2:
        raise ValueError(f"ranks and bytes of {row}")
    if isinstance(entry.us, bool) or not isinstance(entry.us, int | float) or not entry.us > 0:
        raise ValueError(f"us of {row}")
    return entry
