"""The HTML report in a real browser: it draws little, asks for nothing, obeys mouse and keys."""

import pytest

from dsa_compile.inspect.diff import Hunk, pass_diff
from dsa_compile.inspect.store import Stage, Store
from dsa_compile.ir.listing import Listing
from tests.browsing import until
from tests.inspect.report_page import LINE, Report, boxes, named_boxes

# What opening may draw, whatever the number of passes; benchmarks/html_report.py has the seconds.
ELEMENTS = 2500


def test_opening_draws_one_view_and_asks_for_nothing(shown: Report) -> None:
    for _ in range(3):
        shown.open()
    assert shown.page.locator("*").count() < ELEMENTS
    assert [url for url in shown.requests if not url.startswith(("file:", "about:"))] == []
    assert len([url for url in shown.requests if url.startswith("file:")]) == 3
    assert shown.page.locator("#timeline li").count() == len(
        shown.page.evaluate("STAGES.map(s => s.name)")
    )


def timeline(store: Store, name: str) -> str:
    """Selector of the line on which the report lists a pass."""
    number = [stage.name for stage in store.stages].index(name)
    return f"#timeline li[data-stage='{number}']"


def hunks(store: Store, many_to_one: bool) -> tuple[Stage, Hunk]:
    """The first rewrite of several calls into one, or of one call into several."""
    for stage in store.stages[1:]:
        for diff in pass_diff(stage):
            before, after = diff.pairing.before, diff.pairing.after
            assert before is not None
            assert after is not None
            for hunk in diff.hunks:
                out = [name for name in hunk.removed if before.nodes[name].is_call]
                put = [name for name in hunk.made if after.nodes[name].is_call]
                if many_to_one and len(out) > 2 and len(put) == 1:
                    return stage, hunk
                if not many_to_one and len(out) == 1 and len(put) > 2:
                    return stage, hunk
    raise AssertionError("no such rewrite")


@pytest.mark.parametrize("many_to_one", [True, False])
@pytest.mark.parametrize("side", ["before", "after"])
def test_selecting_a_line_selects_its_rewrite_on_both_sides(
    shown: Report, store: Store, many_to_one: bool, side: str
) -> None:
    stage, hunk = hunks(store, many_to_one)
    shown.open(**{"pass": stage.name, "region": hunk.region})
    name = (hunk.removed if side == "before" else hunk.made)[-1]
    shown.page.locator(f".cell.{side}[data-names~={name}]").click(position=LINE)
    assert shown.state()["node"] in (hunk.removed if side == "before" else hunk.made)
    assert shown.names("before", "chosen") >= set(hunk.removed)
    assert shown.names("after", "chosen") >= set(hunk.made)
    other = {n for _, n in ((c.before, c.after) for c in hunk.changed)}
    assert shown.names("after", "near") >= other
    marked = shown.names("before", "chosen") | shown.names("after", "chosen")
    related = {*hunk.removed, *hunk.made}
    # a line may define entries beside those of the rewrite, and no other line is marked
    lines = shown.page.eval_on_selector_all(
        ".cell.chosen", "cells => cells.map(c => c.dataset.names.split(' '))"
    )
    assert all(related & set(line) for line in lines), marked - related
    assert shown.page.locator(".ribbon.chosen").count() == 1


def test_an_unchanged_line_has_its_partner(shown: Report) -> None:
    shown.open(**{"pass": "recognize_swiglu", "region": "moe"})
    shown.page.locator(".cell.before:not(.gone):not(.empty)").first.click(position=LINE)
    name = shown.state()["node"]
    assert name in shown.names("before", "chosen")
    assert name in shown.names("after", "chosen")


def test_keys(shown: Report) -> None:
    shown.open(**{"pass": "recognize_router", "region": "moe"})
    press = shown.page.keyboard.press
    press("n")
    assert shown.state()["node"]
    press("x")
    assert shown.state()["side"] == "before"
    press("Escape")
    assert not shown.state()["node"]
    press("j")
    assert shown.state()["pass"] == "recognize_experts"
    press("k")
    press("k")
    assert shown.state()["pass"] == "recognize_rope_half"
    region = shown.state()["region"]
    press("]")
    assert shown.state()["region"] != region
    press("[")
    assert shown.state()["region"] == region
    press("g")
    assert shown.page.locator("#graph").is_visible()
    press("d")
    assert shown.page.locator("#diff").is_visible()
    folded = shown.page.locator(".cell").count()
    press("u")
    assert shown.page.locator(".cell").count() > folded
    press("?")
    assert shown.page.locator("#help").is_visible()
    press("Escape")
    assert not shown.page.locator("#help").is_visible()


def test_dark_and_light(shown: Report) -> None:
    shown.open()
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = shown.page.evaluate(colour)
    shown.page.keyboard.press("t")
    assert shown.page.evaluate(colour) != dark


def test_a_place_can_be_sent_and_gone_back_from(shown: Report, store: Store) -> None:
    place = {"pass": "merge_projections", "region": "dense", "node": "linear", "side": "after"}
    shown.open(**place, view="graph")
    assert {key: shown.state()[key] for key in place} == place
    shown.page.locator(timeline(store, "recognize_rms_norm")).click()
    assert shown.state()["pass"] == "recognize_rms_norm"
    address = shown.page.evaluate("location.hash")
    assert "pass=recognize_rms_norm" in address
    shown.page.go_back()
    until(shown.page, "state.node === 'linear'")
    assert {key: shown.state()[key] for key in place} == place


def test_a_wrong_place_shows_something(shown: Report) -> None:
    shown.open(**{"pass": "no_such_pass", "region": "nothing", "node": "%3Cb%3E", "overlay": "x"})
    assert shown.page.locator("#rows .cell").count() > 0


def test_search(shown: Report) -> None:
    shown.open(**{"pass": "recognize_router", "region": "moe"})
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("experts_fp8 mlp")
    shown.page.keyboard.press("Enter")
    assert shown.state()["node"] == "experts_fp8"
    assert shown.page.locator(".cell.focus").is_visible()
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("quantize_indexer")
    shown.page.locator("#found li").first.click()
    assert shown.state()["pass"] == "quantize_indexer"
    assert shown.state()["region"] == "moe"
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("layer 2")
    shown.page.keyboard.press("Enter")
    assert shown.state()["region"] == "dense"
    shown.page.keyboard.press("/")
    shown.page.keyboard.type("no such node")
    assert shown.page.locator("#found .none").is_visible()


def test_streams_are_lanes(shown: Report, store: Store) -> None:
    shown.open(**{"pass": "overlap_streams", "region": "moe.long", "view": "graph"})
    assert shown.page.locator(".lane-name").all_text_contents() == ["stream 0", "stream 1"]
    expected: dict[str, int] = {}
    stream = 0
    for node in store.stages[-1].graphs["moe.long"].calls:
        if node.op_name == "on_stream":
            stream = node.args[0]
        expected[node.name] = stream
    lanes = [box["x"] for box in boxes(shown, ".lane")]
    for name, box in named_boxes(shown).items():
        if name in expected:
            inside = [i for i, left in enumerate(lanes) if box["x"] >= left]
            assert max(inside) == expected[name], name


def test_a_drawn_node_can_be_selected(shown: Report) -> None:
    shown.open(**{"pass": "overlap_streams", "region": "moe.long", "view": "graph"})
    shown.page.locator("#graph .node[data-name=linear_fp8]").click()
    assert shown.state()["node"] == "linear_fp8"
    history = shown.page.locator("#history").inner_text()
    for made_it in ("quantize_projections", "merge_projections", "recognize_linear", "exported"):
        assert made_it in history, history
    assert "modeling_deepseek_v32.py:" in history
    assert shown.page.locator(".edge.near").count() > 0


def test_drawn_nodes_do_not_overlap(shown: Report) -> None:
    shown.open(**{"pass": "recognize_sparse_attention", "region": "moe", "view": "graph"})
    found = boxes(shown, "#graph .node > rect")
    for index, one in enumerate(found):
        for other in found[index + 1 :]:
            apart = (
                one["x"] + one["width"] <= other["x"] + 0.5
                or other["x"] + other["width"] <= one["x"] + 0.5
                or one["y"] + one["height"] <= other["y"] + 0.5
                or other["y"] + other["height"] <= one["y"] + 0.5
            )
            assert apart, (one, other)


def test_errors_as_an_overlay(shown: Report, store: Store) -> None:
    shown.open(**{"pass": "absorb_mla", "region": "moe", "overlay": "numerics"})
    badges = shown.page.locator(".cell.after.new .badge").all_text_contents()
    assert badges
    assert set(badges) == {"3.0e-4"}
    assert shown.page.locator(f"{timeline(store, 'absorb_mla')} .good").count() == 1


def test_an_error_that_is_not_finite_is_called_that(shown: Report) -> None:
    shown.open(**{"pass": "merge_shared_expert", "region": "moe", "overlay": "numerics"})
    badges = shown.page.locator(".cell.after.new .badge").all_text_contents()
    assert badges
    assert set(badges) == {"not finite"}
    titles = shown.page.locator("#timeline li .good").evaluate_all("all => all.map(i => i.title)")
    assert titles == ["worst error 3.0e-4", "worst error not finite"]


def test_times_as_an_overlay(shown: Report, store: Store) -> None:
    place = {"pass": "overlap_streams", "region": "moe.long", "view": "graph"}
    shown.open(**place, overlay="time decode 32")
    told = shown.page.locator("#graph .node[data-name=experts_fp8] text").all_text_contents()
    assert told[-1] == "80.0 µs"
    saved = shown.page.locator(f"{timeline(store, 'fuse_add_norm')} .saved")
    assert saved.text_content() == "5.0%"


def test_what_verify_found_is_one_click_away(shown: Report) -> None:
    shown.open()
    shown.page.locator("#verdict.bad").click()
    assert shown.state()["pass"] == "quantize_experts"
    assert "beyond its tolerance" in shown.page.locator("#details").inner_text()


_WALK = """() => {
  const found = [];
  STAGES.forEach((stage, number) => {
    for (const region of Object.keys(number ? stage.changed : stage.graphs)) {
      go({ stage: number, region, node: "", view: "graph" });
      go({ view: "diff", unfolded: true });
      const cells = (kind) => [...document.querySelectorAll(`.cell.${kind}:not(.empty)`)];
      found.push({
        stage: number,
        region,
        lines: cells("after").length,
        gone: cells("before.gone").flatMap((cell) => cell.dataset.names.split(" ")),
        made: cells("after.new").flatMap((cell) => cell.dataset.names.split(" ")),
      });
    }
  });
  return found;
}"""


@pytest.mark.slow
def test_every_change_is_drawn_and_shown_whole(shown: Report, store: Store) -> None:
    shown.open()
    found = shown.page.evaluate(_WALK)
    assert len(found) == sum(len(stage.changed) for stage in store.stages)
    for told in found:
        stage = store.stages[told["stage"]]
        graph = stage.graphs[told["region"]]
        assert told["lines"] == len(graph.inputs) + len([*Listing(graph).statements()]) + 1
        if stage.number:
            [diff] = pass_diff(stage, [told["region"]])
            assert set(diff.pairing.removed) <= set(told["gone"]), (stage.name, told["region"])
            assert set(diff.pairing.made) <= set(told["made"]), (stage.name, told["region"])
