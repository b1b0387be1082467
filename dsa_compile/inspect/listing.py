"""The passes of an artifact, a row each."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dsa_compile.inspect.measured import Case, PassError
from dsa_compile.inspect.store import Store

_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class PassRow:
    """Row of one pass.

    Attributes:
        number: place in the pipeline, from 1.
        name: of the pass.
        numerics: ``bitwise`` or ``tolerance``.
        rewrites: over all layers.
        expected: what the pass promised, or None.
        by_region: rewrites once a graph.
        nodes_before: computing nodes of a step before the pass.
        nodes_after: and after it.
        seconds: it took; None if that is not recorded.
        near_misses: places that almost matched.
        remarks: lines to read.
        recorded: whether it changed a graph and records were kept.
        error: of its rewrites, the largest that ``verify`` found; None if it did not run.
        problem: what ``verify`` found wrong; empty if nothing.
        saved_us: how much longer a layer takes without the pass, if that was timed.
    """

    number: int
    name: str
    numerics: str
    rewrites: int
    expected: int | None
    by_region: dict[str, int]
    nodes_before: int
    nodes_after: int
    seconds: float | None
    near_misses: int
    remarks: tuple[str, ...]
    recorded: bool
    error: float | None = None
    problem: str = ""
    saved_us: float | None = None


def pass_rows(
    store: Store, errors: Mapping[str, PassError] | None = None, case: Case | None = None
) -> list[PassRow]:
    """A row for every pass that ran, in order; needs no records.

    Args:
        store: the artifact.
        errors: by pass, what ``verify`` found.
        case: a step timed with and without passes.
    """
    rows = [
        PassRow(
            number=number,
            name=summary.name,
            numerics=summary.numerics,
            rewrites=summary.rewrites,
            expected=summary.expected,
            by_region=dict(summary.by_region),
            nodes_before=summary.nodes_before,
            nodes_after=summary.nodes_after,
            seconds=store.seconds.get(summary.name),
            near_misses=len(summary.near_misses),
            remarks=summary.remarks,
            recorded=summary.graphs is not None,
        )
        for number, summary in enumerate(store.manifest.passes, start=1)
    ]
    found = errors or {}
    saved = {} if case is None else case.saved_us
    return [
        replace(
            row,
            error=found[row.name].error if row.name in found else None,
            problem=found[row.name].problem if row.name in found else "",
            saved_us=saved.get(row.name),
        )
        for row in rows
    ]


def odd_layers(store: Store) -> list[tuple[int, str, str]]:
    """Layers whose weights do not come from where those of most layers do.

    The strings that weight names are made from, such as ``model.layers.3``, are compared after
    their numbers are replaced by the distance to the layer's own. The norm behind the last layer is
    such an exception in every model: there is no next layer.

    Returns:
        The layer, the variable and its text, for each that differs from the most frequent form.
    """
    found: dict[str, dict[str, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    for layer in store.manifest.layers:
        for name, text in layer.vars.items():
            parts = _NUMBER.split(text)  # numbers at the odd places
            parts[1::2] = [f"{{{int(number) - layer.index:+d}}}" for number in parts[1::2]]
            form = "".join(parts)
            found[name][form].append((layer.index, text))
    odd = []
    for name, forms in found.items():
        usual = max(forms.values(), key=len)
        for same in forms.values():
            if same is not usual:
                odd += [(index, name, text) for index, text in same]
    return sorted(odd)
