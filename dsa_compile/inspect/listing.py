"""The passes of an artifact, a row each."""

import re
from collections import defaultdict
from typing import Any

from dsa_compile.inspect.measured import Case, Verified
from dsa_compile.inspect.store import Store

_NUMBER = re.compile(r"(\d+)")
_OF_SUMMARY = (
    "name", "numerics", "rewrites", "expected", "by_region", "nodes_before", "nodes_after",
)  # fmt: skip


def pass_rows(
    store: Store, report: Verified | None = None, case: Case | None = None
) -> list[dict[str, Any]]:
    """A row for every pass that ran, in order; needs no records.

    A row has what the manifest says of the pass, near-misses counted and ``recorded`` for whether
    it changed a graph and records were kept; ``number``, its place in the pipeline, from 1;
    ``seconds`` that it took, ``error``, the largest of its rewrites, and ``saved_us``, how much
    longer a layer takes without it, each None if not known; and ``problem``, what ``verify`` found
    wrong.

    Args:
        store: the artifact.
        report: of ``verify``.
        case: a step timed with and without passes.
    """
    rows = []
    for number, summary in enumerate(store.manifest.passes, start=1):
        found = {} if report is None else report.passes.get(summary.name, {})
        rows.append(
            {
                "number": number,
                **{name: getattr(summary, name) for name in _OF_SUMMARY},
                "seconds": store.seconds.get(summary.name),
                "near_misses": len(summary.near_misses),
                "remarks": summary.remarks,
                "recorded": summary.graphs is not None,
                "error": found.get("error"),
                "problem": found.get("problem", ""),
                "saved_us": None if case is None else case.saved_us.get(summary.name),
            }
        )
    return rows


def odd_layers(store: Store) -> list[tuple[int, str, str]]:
    """Layers whose weights do not come from where those of most layers do.

    The strings that weight names are made from, such as ``model.layers.3``, are compared after
    their numbers are replaced by the distance to the layer's own. The norm after the last layer is
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
