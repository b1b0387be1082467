"""Cases of which ``make test`` runs the first few and ``make test-all`` every one."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick_first(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Mark all cases behind the first ``quick`` as slow.

    Args:
        cases: as for ``pytest.mark.parametrize``: values, or tuples of them.
        quick: how many stay.
    """
    some = list(cases)
    rest = [case if isinstance(case, tuple) else (case,) for case in some[quick:]]
    return [*some[:quick], *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]
