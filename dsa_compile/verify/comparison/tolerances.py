"""Limits: what the two sides of a rewrite must agree in, by the promise of its pass.

A pass that promises the same bits is held to them. Any other is held to two things. In exact
arithmetic both sides give the same numbers, but for what fp64 rounds: a limit that no recipe, width
or prompt changes. And the replacement's own rounding is not much more than the matched subgraph's,
measured on the same operands (:mod:`dsa_compile.verify.comparison.rounding`).
"""

import math

from dsa_compile.ir.passes import Numerics
from dsa_compile.verify.comparison.agreement import Agreement
from dsa_compile.verify.comparison.rounding import Rounding
from dsa_compile.verify.comparison.topk_choice import Choice

EXACT = 1e-8
"""Relative error of a row in exact arithmetic. Healthy rewrites stay below 1e-12."""

RATIO = 2.0
"""Rounding error after a rewrite, over the healthy op's."""

DEFICIT = 1e-6
"""Greatest deficit of a chosen key below the cut in exact arithmetic, in standard deviations."""


REORDERED = 2.0**-18
"""Relative error of a row in fp32 that another order of its sums or products explains."""


def bitwise_problem(found: Agreement) -> str:
    """Problem of values that are not equal to the last bit, or the empty text."""
    if found.bitwise:
        return ""
    unseen = found.max_abs == 0.0 and found.overlap is None
    return "is not equal to the last bit" + (": signs of zeros, or NaNs" if unseen else "")


def exact_problem(found: Agreement, choice: Choice | None, inputs: str = "") -> str:
    """Problem of values that are not the same numbers in exact arithmetic, or the empty text.

    Args:
        found: how far the two sides agree.
        choice: of keys, if one is compared.
        inputs: which of :data:`~dsa_compile.verify.checks.variations.VARIATIONS`.
    """
    if found.error == math.inf:
        return "is not finite or not of the same kind"
    if found.error > EXACT:
        return f"differs by {found.error:.1e} in exact arithmetic"
    if inputs == "equal" or found.overlap in (None, 1.0):  # of keys that tie, any will do
        return ""
    if choice is None:
        return f"chooses {found.overlap:.0%} of the same keys"
    if choice.deficit <= DEFICIT:
        return ""
    return (
        f"chooses keys {choice.deficit:.1e} deviations below the cut; "
        f"{choice.overlap:.0%} of the best keys"
    )


def finite_problem(found: Agreement) -> str:
    """Problem of values that cannot be compared, or the empty text."""
    return "is not finite or not of the same kind" if found.error == math.inf else ""


def rounding_problem(found: Rounding) -> str:
    """Problem of a replacement that rounds too much, or the empty text."""
    if found.ratio <= RATIO:
        return ""
    healthy = math.hypot(found.before, found.format)
    return f"rounds by {found.after:.1e}, {found.ratio:.1f} times the healthy {healthy:.1e}"


def pass_problem(numerics: Numerics, found: Agreement, exact: bool) -> str:
    """Problem of what a layer returns after a pass, or the empty text.

    Args:
        numerics: what the pass promises.
        found: how far the layer agrees with itself before the pass.
        exact: whether both ran in exact arithmetic.
    """
    if exact:
        return exact_problem(found, None)
    return bitwise_problem(found) if numerics is Numerics.BITWISE else finite_problem(found)
