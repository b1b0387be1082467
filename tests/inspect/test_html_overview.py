"""The first screen of the HTML report, and what it takes to learn what a pass did."""

import re

import pytest

from dsa_compile.inspect.store import Store
from tests.inspect.report_page import LAPTOP, PHONE, Report

PASS = "recognize_sparse_attention"


def inside(shown: Report, selector: str) -> bool:
    """Whether an element is on the screen as it is, without scrolling."""
    box = shown.page.locator(selector).bounding_box()
    size = shown.page.viewport_size
    assert size is not None
    return (
        box is not None
        and box["x"] >= 0
        and box["y"] >= 0
        and box["x"] + box["width"] <= size["width"]
        and box["y"] + box["height"] <= size["height"]
    )


def says_what_it_did(shown: Report, store: Store) -> None:
    """The page of the pass: its purpose, both drawings, and every kind of layer that it changed."""
    assert shown.state()["pass"] == PASS
    assert "Recognise DeepSeek Sparse Attention" in shown.page.locator("#purpose").inner_text()
    before, after = shown.page.locator("#about-pass pre").all_text_contents()
    assert "sdpa(q, k, v, causal & keep, scale)" in before
    assert "dsa.index_topk(" in after
    where = shown.page.locator("#places li").all_inner_texts()
    changed = store.stage(PASS).changed
    assert [text.split("\n")[0].split()[0] for text in where] == list(changed)
    assert any("58 × layers 3-60" in text and "self_attn" in text for text in where)


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_what_a_pass_did_and_where_takes_two_clicks(
    shown: Report, store: Store, size: dict[str, int]
) -> None:
    shown.page.set_viewport_size(size)
    shown.open()
    assert shown.page.locator("#overview").is_visible()
    row = f"#timeline li:has-text('{PASS}') button"
    if size is PHONE:  # the list of passes is a drawer there
        shown.page.locator("#menu").click()
        assert inside(shown, row)
        shown.page.locator(row).click()
        says_what_it_did(shown, store)
        return
    assert inside(shown, row)
    shown.page.locator(row).click()
    says_what_it_did(shown, store)
    place = ".place[data-region=moe]"
    assert inside(shown, place)
    shown.page.locator(place).click()
    assert shown.state()["region"] == "moe"
    assert shown.names("after", "chosen") >= {"index_topk", "sparse_attention"}
    details = shown.page.locator("#details").inner_text()
    assert "moe, layers 3-60" in details
    assert "modeling_deepseek_v32.py:" in details


def test_the_overview_says_what_was_compiled(shown: Report, store: Store) -> None:
    shown.open()
    text = shown.page.locator("#overview").inner_text()
    for words in ("61 layers for sm_90a, recipe fp8", "hidden 7,168", "256 + 1 shared", "3-60"):
        assert words in text
    rows = shown.page.locator("#summary tbody tr")
    assert rows.count() == len(store.stages) - 1
    for stage, row in zip(store.stages[1:], rows.all_inner_texts(), strict=True):
        assert stage.name in row.replace("\n", "")
        assert store.about[stage.name].plain_purpose in row
        assert stage.summary is not None
        assert (f"{stage.summary.rewrites:,}" if stage.summary.rewrites else "none") in row
    assert (
        "✗ beyond its tolerance" in rows.nth(store.pass_number("quantize_experts") - 1).inner_text()
    )
    assert "µs" in rows.nth(store.pass_number("fuse_add_norm") - 1).inner_text()


def test_the_overview_leads_to_passes_and_graphs_and_back(shown: Report) -> None:
    shown.open()
    shown.page.locator(f"#summary button:has-text('{PASS}')").click()
    assert shown.page.locator("#diff").is_visible()
    assert not shown.page.locator("#overview").is_visible()
    shown.page.go_back()
    shown.page.locator("#overview").wait_for()
    shown.page.locator("#kinds").get_by_role("button", name="moe.long", exact=True).click()
    assert shown.state()["pass"] == "overlap_streams"
    assert shown.page.locator("#graph .node").count() > 10
    shown.page.locator("#home").click()
    assert shown.page.locator("#overview").is_visible()


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_no_name_is_cut(shown: Report, size: dict[str, int]) -> None:
    shown.page.set_viewport_size(size)
    shown.open()
    if size is PHONE:
        shown.page.locator("#menu").click()
    cut = """selector => [...document.querySelectorAll(selector)].filter(one => {
      const [own, row] = [one, one.closest("li, tr")].map(each => each.getBoundingClientRect());
      return one.scrollWidth > one.clientWidth + 1 || own.right > row.right + 1;
    }).map(one => one.textContent)"""
    assert shown.page.evaluate(cut, "#timeline .pass") == []
    assert shown.page.evaluate(cut, "#summary tbody th") == []
    shown.open(**{"pass": "fuse_norm_quantize_across_layers", "region": "moe"})
    title = shown.page.locator("#pass-title").inner_text()
    assert re.match(r"\d+ fuse_norm_quantize_across_layers", title)
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert shown.page.evaluate(wide) == 0


def test_the_signs_of_the_list_are_explained(shown: Report) -> None:
    shown.open()
    used = set(shown.page.locator("#timeline .marks i:not(.saved)").all_text_contents())
    told = set(shown.page.locator("#signs i").all_text_contents())
    assert used == {"≈", "!", "✓", "✗"}
    assert used <= told
    assert shown.page.locator("#signs .length").is_visible()


def test_a_phone_shows_the_pass_and_not_only_its_list(shown: Report) -> None:
    shown.page.set_viewport_size(PHONE)
    for view in ("diff", "graph"):
        shown.open(**{"pass": "absorb_mla", "region": "moe", "view": view})
        box = shown.page.locator(f"#{view}").bounding_box()
        assert box is not None
        assert box["width"] == PHONE["width"]
        assert box["height"] > PHONE["height"] / 3
        assert not shown.page.locator("#passes").is_visible()
    shown.page.locator("#more").click()
    assert shown.page.locator("#details").is_visible()
    shown.page.keyboard.press("Escape")
    assert not shown.page.locator("#details").is_visible()
    # one column: what stays stands there once
    shown.open(**{"pass": "absorb_mla", "region": "moe"})
    assert shown.page.locator(".row.same .before").evaluate_all(
        "all => all.every(one => getComputedStyle(one).display === 'none')"
    )
    gone = shown.page.locator(".cell.before.gone").first.bounding_box()
    assert gone is not None
    assert gone["width"] > 0.9 * PHONE["width"]
