"""A headless browser for tests, where the machine has one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium(bundled: str) -> str | None:
    """A Chromium: ``DSA_CHROMIUM``, one on the path, or playwright's own."""
    named = os.environ.get("DSA_CHROMIUM")
    if named:
        return named
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    return found or (bundled if Path(bundled).is_file() else None)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running browser; skips the test where there is none."""
    with sync_playwright() as playwright:
        path = find_chromium(playwright.chromium.executable_path)
        if path is None:
            pytest.skip(
                "no Chromium here: apt-get install chromium, or playwright install chromium"
            )
        # the sandbox needs privileges that containers and CI seldom have; the page is our own
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
