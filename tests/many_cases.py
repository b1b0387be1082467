"""Random cases of the tests that are worth hours: few by default, more by request."""

import os


def many(usual: int) -> int:
    """``DSA_TEST_CASES`` of the environment, or ``usual``."""
    return int(os.environ.get("DSA_TEST_CASES", usual))
