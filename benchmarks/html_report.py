"""Write the HTML report of the published geometry, 61 layers, and open it: size and seconds.

    python -m benchmarks.html_report

Opening is timed in headless Chromium, from the navigation until the page can be used, the time of
its scripts apart; without a browser only the writing is timed.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

from compile_full_geometry import CONFIG

from dsa_compile.cli.inspect.command import main as inspect
from dsa_compile.lowering.compile_model import compile_model
from tests.chromium import NoBrowserError, chromium

OPENINGS = 7


def write(folder: Path, recipe: str, target: str) -> Path:
    """Compile and write the report; prints what that takes."""
    model, artifact, report = folder / "model", folder / "deepseek-v3.2", folder / "report.html"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    options = {"weights": "none", "compiled_kernels": False}
    compile_model(model, artifact, recipe=recipe, target=target, **options)
    started = time.perf_counter()
    assert inspect([str(artifact), "html", "-o", str(report)]) == 0
    seconds = time.perf_counter() - started
    print(f"recipe {recipe}: {report.stat().st_size / 1e3:.0f} KB, written in {seconds:.2f} s")
    return report


def open_it(report: Path) -> None:
    """Open it several times, each in a new page."""
    opened, scripts = [], []
    with chromium() as browser:
        for _ in range(OPENINGS):
            page = browser.new_page(viewport={"width": 1600, "height": 900})
            started = time.perf_counter()
            page.goto(f"file://{report}")
            page.wait_for_selector("html[data-ready]")
            opened.append(time.perf_counter() - started)
            timing = "performance.getEntriesByType('navigation')[0]"
            scripts.append(page.evaluate(f"{timing}.domContentLoadedEventEnd") / 1e3)
            page.close()
    print(
        f"opened in {statistics.median(opened):.2f} s (worst {max(opened):.2f}), "
        f"of which the document and its scripts {statistics.median(scripts):.2f} s"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name), "fp8", "sm_90a")
        try:
            open_it(path)
        except NoBrowserError as error:
            print(error)
