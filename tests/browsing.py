"""Waiting in a browser, whatever the page's content security policy forbids."""

import time
from typing import Any


def until(page: Any, expression: str, seconds: float = 120) -> None:
    """Wait for a JavaScript expression to hold.

    Playwright's ``wait_for_function`` evaluates a string inside of the page, which a policy
    without ``unsafe-eval`` refuses unless the first answer is yes; ``evaluate`` passes it by.

    Raises:
        AssertionError: it does not hold after ``seconds``.
    """
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never came true: {expression}"
        page.wait_for_timeout(50)
