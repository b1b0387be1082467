"""Take the pictures of the HTML report that the documentation shows.

    python -m benchmarks.screenshots [FOLDER]      docs/images by default

The report is that of the published geometry, 61 layers, recipe fp8 with two streams. Needs a
Chromium, as the tests of the report do, and Pillow, which comes with matplotlib.
"""

import sys
import tempfile
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from html_report import write
from PIL import Image

from tests.chromium import chromium

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
LAPTOP = (1280, 800)
PHONE = (390, 844)
COLOURS = 128


@dataclass(frozen=True)
class Shot:
    """One picture: the place in the report, and the screen."""

    name: str
    place: dict[str, str] = field(default_factory=dict)
    size: tuple[int, int] = LAPTOP
    theme: str = "light"


SHOTS = (
    Shot("report-overview"),
    Shot("report-diff", {"pass": "recognize_swiglu", "region": "moe", "node": "swiglu"}),
    Shot(
        "report-streams",
        {"pass": "overlap_streams", "region": "moe.long", "view": "graph"},
        theme="dark",
    ),
    Shot("report-phone", {"pass": "recognize_sparse_attention", "region": "moe"}, PHONE),
)


def take(report: Path, folder: Path) -> None:
    """Write every picture as PNG."""
    with chromium() as browser:
        for shot in SHOTS:
            width, height = shot.size
            page = browser.new_page(viewport={"width": width, "height": height})
            page.emulate_media(color_scheme=shot.theme)  # type: ignore[arg-type]
            fields = "&".join(f"{key}={value}" for key, value in shot.place.items())
            page.goto(f"file://{report}#{fields}")
            page.wait_for_selector("html[data-ready]")
            path = folder / f"{shot.name}.png"
            picture = Image.open(BytesIO(page.screenshot()))
            page.close()
            # a page has few colours: a palette makes the file a third as large
            picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
            print(f"{path}: {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name), "fp8", "sm_90a")
        take(path, Path(sys.argv[1]) if sys.argv[1:] else IMAGES)
