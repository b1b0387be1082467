"""Find hazards of a region that runs on several streams or in a captured graph.

Every artifact is checked when it is compiled and again when it is read. The checker looks at the
graph alone: the order of its calls, their streams and events, and what the ops' schemas say about
memory. It assumes that a kernel may run at any time that the events allow.
"""

from collections.abc import Collection, Iterator

from torch._ops import OpOverload

from dsa_compile.ir.hazard import Hazard
from dsa_compile.ir.hazards_calls import call_hazards
from dsa_compile.ir.hazards_streams import stream_hazards
from dsa_compile.ir.region import Region
from dsa_compile.ops import FACTS

COLLECTIVES = frozenset(op for op, facts in FACTS.items() if facts.collective)
"""Ops that meet other devices. All must run in one order everywhere: that of stream 0."""


def find_hazards(
    region: Region, collectives: Collection[OpOverload] = COLLECTIVES
) -> Iterator[Hazard]:
    """Hazards of a region, found lazily.

    Args:
        region: of the KERNEL level.
        collectives: ops held to stream 0.
    """
    yield from stream_hazards(region)
    yield from call_hazards(region, collectives)
