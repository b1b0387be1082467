"""Regions that a question is about: ``--layer``, ``--kind``, ``--variant``."""

from collections.abc import Iterable

from dsa_compile.errors import UserError
from dsa_compile.inspect.store import Store, unknown


def regions_of(
    store: Store,
    names: Iterable[str],
    layer: int | None = None,
    kind: str | None = None,
    variant: str | None = None,
) -> list[str]:
    """Names of the regions that fit.

    Args:
        store: the artifact.
        names: of regions.
        layer: only what this layer of the model runs.
        kind: only regions of this kind, ``moe`` or ``moe.long``.
        variant: only ``long``, ``short`` or ``prompt``; regions that are not split always fit.

    Raises:
        UserError: the artifact has no such layer, kind or variant, or they contradict each other.
    """
    if kind is not None:
        kind, _, named = kind.partition(".")
        variant = variant or named or None
        kinds = [*dict.fromkeys(call.kind for call in store.manifest.calls)]
        if kind not in kinds:
            raise UserError(unknown("kind", kind, kinds))
    if variant is not None and variant not in store.manifest.variants:
        choices = store.manifest.variants
        if not choices:
            raise UserError(f"{store.path} has no variants; leave out {variant!r}")
        raise UserError(unknown("variant", variant, choices))
    if layer is not None:
        entry = store.layer(layer)
        if kind is not None and kind != entry.kind:
            raise UserError(f"layer {layer} is of kind {entry.kind!r}, not {kind!r}")
        kind = entry.kind
    return [
        name
        for name in names
        if (kind is None or name.partition(".")[0] == kind)
        and (variant is None or name.partition(".")[2] in ("", variant))
    ]
