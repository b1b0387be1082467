"""Links and pictures of the docs: what they name is there, and pictures can be read aloud."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.commands import ROOT
from tests.docs.pages import PAGES

PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def anchors(page: Path) -> set[str]:
    """The names that a page's headings can be linked by."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists() or (anchor and anchor not in anchors(linked)):
            lost.append(target)
    assert not lost


def test_every_page_is_linked() -> None:
    linked = {
        (ROOT / page).parent.joinpath(target.partition("#")[0]).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    }
    assert {ROOT / page for page in PAGES} - linked <= {ROOT / "README.md"}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_pictures_have_a_title_and_a_description(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert all((root.findtext(f"{SVG}{name}") or "").strip() for name in ("title", "desc"))
    assert root.get("aria-labelledby") == "title desc"
    # drawn on a ground of its own, so that it is legible on a dark page too
    assert root.find(f"{SVG}rect[@class='bg']") is not None
