"""The weight plan of an artifact, to read."""

from collections.abc import Mapping
from typing import Any

from dsa_compile.errors import ArtifactError
from dsa_compile.inspect.store import Store
from dsa_compile.ir.graph import type_text

_MOST_VALUES = 4


def weight_texts(store: Store) -> dict[tuple[str, str], str]:
    """Type and expression of each weight, by kind of region and key.

    Raises:
        ArtifactError: the plan's file is damaged.
    """
    path = store.manifest.weights.plan
    plan = {} if path is None else store.read_json(path)
    try:
        return {
            (kind, key): f"{type_text(entry)} = {expression_text(entry['expr'])}"
            for kind, entries in plan.items()
            for key, entry in entries.items()
        }
    except (AttributeError, KeyError, TypeError):
        raise ArtifactError(f"{store.path / str(path)}: not a weight plan; recompile") from None


def expression_text(expression: Mapping[str, Any]) -> str:
    """``narrow(reshape({layer}.kv_b_proj.weight, shape=[8, 64, 64]), dim=1, …)``."""
    if expression["op"] == "load":
        return str(expression["key"])
    inner = [expression["of"]] if "of" in expression else expression.get("parts", [])
    arguments = [expression_text(each) for each in inner]
    for name, value in expression.items():
        if name not in ("op", "of", "parts"):
            long = isinstance(value, list) and len(value) > _MOST_VALUES
            shown = f"{str(value[:_MOST_VALUES])[:-1]}, …]" if long else str(value)
            arguments.append(f"{name}={shown}")
    return f"{expression['op']}({', '.join(arguments)})"
