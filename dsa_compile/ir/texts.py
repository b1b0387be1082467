"""Regions as text, printed again only where something has changed."""

import operator
from typing import Any

from dsa_compile.ir.printer import region_to_python
from dsa_compile.ir.region import Region

_META = ("val", "path", "role", "key")


class Texts:
    """The last text of each region of a program, as
    :func:`~dsa_compile.ir.printer.region_to_python` makes it.

    A pass changes few regions, and printing takes longer than most passes.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[Any], str]] = {}

    def of(self, region: Region) -> str:
        """The text of a region as it is now."""
        found = _state(region)
        state, text = self._known.get(region.name, ([], ""))
        if len(state) != len(found) or not all(map(operator.is_, state, found)):
            text = region_to_python(region)
            self._known[region.name] = found, text
        return text


def _state(region: Region) -> list[Any]:
    """All that the text is made from, to be compared by identity: values may be symbolic."""
    state: list[Any] = [region.outputs]
    for node in region.graph.nodes:
        state += (node, node.name, node.target, node.args, node.kwargs)
        state += map(node.meta.get, _META)
    return state
