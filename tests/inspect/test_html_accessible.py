"""The HTML report for eyes that need contrast, for keyboards and for screen readers."""

from typing import Any

import pytest

from tests.inspect.report_page import LAPTOP, PHONE, Report
from tests.quick_cases import quick_first

PLACES: dict[str, dict[str, str]] = {
    "overview": {},
    "diff": {"pass": "recognize_sparse_attention", "region": "moe", "node": "sparse_attention"},
    "moved": {"pass": "flatten_tokens", "region": "moe", "overlay": "pass"},
    "errors": {"pass": "absorb_mla", "region": "moe", "overlay": "numerics"},
    "exported": {"pass": "export", "region": "moe"},
    "graph": {"pass": "absorb_mla", "region": "moe", "view": "graph", "side": "before"},
    "streams": {"pass": "overlap_streams", "region": "moe.long", "view": "graph"},
}


def serious(shown: Report) -> list[str]:
    """Violations that axe-core finds serious or critical."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found: list[dict[str, Any]] = axe.Axe().run(shown.page).response["violations"]
    return [
        f"{one['id']}: {node['target']} {node['html'][:120]} {node['failureSummary']}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


@pytest.mark.parametrize(
    ("size", "theme"),
    quick_first([(LAPTOP, "light"), (LAPTOP, "dark"), (PHONE, "dark")]),
    ids=["laptop-light", "laptop-dark", "phone"],
)
@pytest.mark.parametrize("place", PLACES)
def test_axe_finds_nothing_serious(
    shown: Report, place: str, size: dict[str, int], theme: Any
) -> None:
    shown.page.set_viewport_size(size)
    shown.page.emulate_media(color_scheme=theme)
    shown.open(**PLACES[place])
    assert serious(shown) == []


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_axe_finds_nothing_serious_in_what_opens(shown: Report, size: dict[str, int]) -> None:
    shown.page.set_viewport_size(size)
    shown.open(**PLACES["diff"])
    if size is PHONE:
        shown.page.locator("#menu").click()
        assert serious(shown) == []
        shown.page.keyboard.press("Escape")
        shown.page.locator("#more").click()
        assert serious(shown) == []
        shown.page.keyboard.press("Escape")
    shown.page.keyboard.press("?")
    assert serious(shown) == []
    shown.page.keyboard.press("Escape")
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("self_attn")
    assert serious(shown) == []


# axe-core passes over the text of drawings: their contrast and sizes as the browser computes them
_DRAWN = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const part = (value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => value / 255);
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  return [...document.querySelectorAll("#graph .node text:not(.heat)")].map((text) => {
    const box = text.parentNode.querySelector("rect");
    const [a, b] = [text, box].map((one) => light(getComputedStyle(one).fill))
      .sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), parseFloat(getComputedStyle(text).fontSize)];
  });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("overlay", ["", "pass", "numerics", "time decode 32"])
def test_the_text_of_drawings_can_be_read(shown: Report, theme: Any, overlay: str) -> None:
    shown.page.emulate_media(color_scheme=theme)
    for number, region in (("absorb_mla", "moe"), ("overlap_streams", "moe.long")):
        shown.open(**{"pass": number, "region": region, "view": "graph", "overlay": overlay})
        found = shown.page.evaluate(_DRAWN)
        assert found
        assert min(contrast for contrast, _ in found) >= 4.5
        assert min(size for _, size in found) >= 11


def test_no_text_is_smaller_than_eleven_pixels(shown: Report) -> None:
    smallest = """() => Math.min(...[...document.querySelectorAll("body *")]
      .filter(one => one.getClientRects().length && [...one.childNodes].some(
        child => child.nodeType === 3 && child.textContent.trim()))
      .map(one => parseFloat(getComputedStyle(one).fontSize)))"""
    for place in PLACES.values():
        shown.open(**place)
        assert shown.page.evaluate(smallest) >= 11


def test_the_list_and_the_views_obey_arrows(shown: Report) -> None:
    shown.open()
    press = shown.page.keyboard.press
    buttons = shown.page.locator("#timeline button")
    (place,) = [
        n for n, text in enumerate(buttons.all_inner_texts()) if "recognize_sparse_att" in text
    ]
    buttons.first.focus()
    for _ in range(place):
        press("ArrowDown")
    press("Enter")
    assert shown.state()["pass"] == "recognize_sparse_attention"
    shown.page.locator("#tab-diff").focus()
    press("ArrowRight")
    assert shown.state()["view"] == "graph"
    assert shown.page.locator("#tab-graph[aria-selected=true]").count() == 1
    press("ArrowRight")
    assert shown.state()["view"] == "overview"


def test_lines_of_a_diff_are_walked_with_arrows(shown: Report) -> None:
    shown.open(**{"pass": "recognize_swiglu", "region": "moe"})
    press = shown.page.keyboard.press
    shown.page.locator("#diff").focus()
    press("ArrowDown")
    first = shown.state()["node"]
    press("ArrowDown")
    assert shown.state()["node"] not in ("", first)
    press("ArrowUp")
    assert shown.state()["node"] == first
    press("ArrowLeft")
    assert shown.state()["side"] == "before"
    assert shown.page.locator(":focus").get_attribute("aria-selected") == "true"


def test_nodes_of_a_graph_are_walked_with_arrows(shown: Report) -> None:
    shown.open(**{"pass": "overlap_streams", "region": "moe.long", "view": "graph"})
    shown.page.locator("#graph .node[tabindex='0']").focus()
    press = shown.page.keyboard.press
    press("Enter")
    first = shown.state()["node"]
    press("ArrowDown")
    second = shown.state()["node"]
    inputs = shown.page.evaluate("lookedAt().definition.get(state.node).i")
    assert first != second
    assert first in inputs or any(first in name for name in inputs)
    press("ArrowUp")
    assert shown.state()["node"] == first
    label = shown.page.locator(":focus").get_attribute("aria-label")
    assert label is not None
    assert "self_attn" in label or "norm" in label
