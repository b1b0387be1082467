"""Cases of which ``make test`` runs the first few and ``make test-all`` every one."""

from collections.abc import Iterable
from typing import Any

import pytest

_LATER = (pytest.mark.slow, pytest.mark.nightly)


def quick_first(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Mark all cases after the first ``quick`` as slow, and leave them to the night.

    Args:
        cases: as for ``pytest.mark.parametrize``: values, or tuples of them.
        quick: how many stay.
    """
    some = list(cases)
    rest = [case if isinstance(case, tuple) else (case,) for case in some[quick:]]
    return [*some[:quick], *(pytest.param(*case, marks=_LATER) for case in rest)]
