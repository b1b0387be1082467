"""Plans: which regions a step calls, in order, with whose weights and whose caches.

A program has named plans. ``model`` computes logits from tokens; a second one, such as a draft
model's, calls the same or other regions with other weights. A step runs the calls of one plan in
order over one table of named values, each call replacing the values that its region returns.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

MODEL = "model"
"""The plan that computes logits from tokens."""

DRAFT, DEEPER = "draft", "deeper_draft"
"""Plans that draft the token after the next: from the model's states, and from a draft's own."""

LONG, SHORT, PROMPT, LONG_PROMPT = "long", "short", "prompt", "long_prompt"
"""Variants of regions, such as ``moe.long``: a step in which no context exceeds ``index_topk`` runs
the short ones, any other step the long ones. Where every request's tokens begin at position 0, a
step may run the prompt ones in place of the short ones, and the long prompt ones in place of the
long ones."""

VARIANTS = (LONG, SHORT, PROMPT, LONG_PROMPT)
"""All of them in the order in which programs and manifests list theirs."""

PROMPTS = {PROMPT: SHORT, LONG_PROMPT: LONG}
"""Variants of whole prompts, and the one of any step that each is made from."""

_TAKING = {SHORT: (SHORT, LONG), PROMPT: (PROMPT, SHORT, LONG), LONG_PROMPT: (LONG_PROMPT, LONG)}


def for_prompts(variant: str | None) -> str | None:
    """The variant of whole prompts that is made from another; None where there is none."""
    return next((new for new, old in PROMPTS.items() if old == variant), None)


def variants_taking(variant: str) -> tuple[str, ...]:
    """The variants that can run a step of a variant, the one made for it first."""
    return _TAKING.get(variant, (variant,))


def region_name(regions: Container[str], kind: str, variant: str | None) -> str:
    """The name of the region that a kind runs in a variant.

    A kind that is not split serves every variant, and one without regions of prompts runs those
    that they would have been made from.

    Args:
        regions: names of those there are.
        kind: of region.
        variant: of the step; None where nothing is split.
    """
    for taking in () if variant is None else variants_taking(variant):
        if (name := f"{kind}.{taking}") in regions:
            return name
    return kind


@dataclass(frozen=True)
class Call:
    """One call of a region.

    Attributes:
        name: unique among the calls of all plans of a program, such as ``"layer_003"``; packed
            weights are stored under it.
        kind: the kind of region that it runs.
        vars: the strings that weight templates name, such as ``{"layer": "model.layers.3"}``.
        caches: name of the call that owns the caches read and written here: its own, or another's
            where layers share rows; None for a region without caches.
        layer: number of the decoder layer in the model; None for what is not one.
    """

    name: str
    kind: str
    vars: Mapping[str, str]
    caches: str | None
    layer: int | None

    @property
    def index(self) -> int:
        """Number of the decoder layer; only a call that runs one has it."""
        assert self.layer is not None, f"{self.name} runs no decoder layer"
        return self.layer


@dataclass(frozen=True)
class Plan:
    """The calls of a step, in order, and the names of the values that the step returns.

    Attributes:
        calls: in order.
        results: names of values.
        follows: name of the plan whose values it starts with; None for one that starts with none.
    """

    calls: tuple[Call, ...]
    results: tuple[str, ...]
    follows: str | None = None

    @property
    def layers(self) -> tuple[Call, ...]:
        """The calls that run decoder layers of the model."""
        return tuple(call for call in self.calls if call.layer is not None)

    @property
    def writing(self) -> tuple[Call, ...]:
        """The calls up to the last one with caches: all that a step without results must run."""
        last = max((i for i, c in enumerate(self.calls) if c.caches is not None), default=-1)
        return self.calls[: last + 1]

    def first_layers(self, count: int) -> "Plan":
        """Plan with its first ``count`` decoder layers alone."""
        kept = self.layers[:count]
        calls = (call for call in self.calls if call.layer is None or call in kept)
        return replace(self, calls=tuple(calls))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of region in the order in which they are first called."""
        return tuple(dict.fromkeys(call.kind for call in self.calls))
