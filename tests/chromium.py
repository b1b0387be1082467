"""A headless browser for tests and benchmarks, where the machine has one; needs playwright."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NoBrowserError(Exception):
    """The machine has no Chromium; the message says how to get one."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A running Chromium: that of ``DSA_CHROMIUM``, one on the path, or playwright's own.

    Raises:
        NoBrowserError: there is none.
    """
    with sync_playwright() as playwright:
        bundled = playwright.chromium.executable_path
        path = os.environ.get("DSA_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
        if path is None and not Path(bundled).is_file():
            raise NoBrowserError(
                "no Chromium here: apt-get install chromium, or playwright install chromium"
            )
        # the sandbox needs privileges that containers and CI seldom have; the page is our own
        browser = playwright.chromium.launch(executable_path=path or bundled, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()
