"""How much a model shall reason: the names of OpenAI's API, and what a template makes of them."""

import re
from collections.abc import Callable

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_UNKNOWN = "unlisted"


def is_off(effort: str, own: str | None = None) -> bool:
    """Whether an effort turns reasoning off: ``none``, or ``minimal`` where a model has no ``low``.

    Args:
        effort: one of :data:`EFFORTS`.
        own: the model's own level for it; None if its levels are on and off.
    """
    return effort == "none" or (effort == "minimal" and own not in ("minimal", "low"))


def template_efforts(render: Callable[[str], str | None]) -> dict[str, str]:
    """A template's own level for each effort, found by rendering; empty if it has no levels.

    Templates know some of the names. What they make of the others may be their highest level, as
    in GLM-5.2 (``high``, anything else is ``max``) and GLM-5.3 (``low``, ``high``, else ``max``):
    so an unknown name becomes the next higher level, or the highest. A template that does not say
    which level its default is decides about unknown names itself.

    Args:
        render: the prompt for a value of ``reasoning_effort``; None where the template refuses it.
    """
    default = render(_UNKNOWN)
    prompts = {effort: render(effort) for effort in EFFORTS}
    levels = [each for each in EFFORTS if prompts[each] not in (None, default)]
    if not levels:
        return {}
    if default is not None:
        written = [prompts[each] or "" for each in levels]
        others = [each for each in EFFORTS if prompts[each] == default]
        said = [e for e in others if _says(default, e) and not any(_says(p, e) for p in written)]
        if len(said) != 1:
            return {each: each for each in EFFORTS if each != "none" or each in levels}
        levels = sorted((*levels, *said), key=EFFORTS.index)
    own = {each: each for each in levels}
    graded = [each for each in levels if each != "none"]
    for at, effort in enumerate(EFFORTS):
        if graded and effort != "none":
            higher = (level for level in graded if EFFORTS.index(level) >= at)
            own[effort] = next(higher, graded[-1])
    return own


def _says(prompt: str, word: str) -> bool:
    return re.search(rf"\b{word}\b", prompt, re.IGNORECASE) is not None
