"""The drawn graphs of the HTML report: where nodes and edges lie, and what part of them is seen."""

from typing import Any

import pytest

from tests.browsing import until
from tests.inspect.report_page import LAPTOP, PHONE, Report, boxes, named_boxes

ATTENTION = {"pass": "recognize_sparse_attention", "region": "moe", "view": "graph"}
STREAMS = {"pass": "overlap_streams", "region": "moe.long", "view": "graph"}


def on_screen(shown: Report, box: dict[str, float]) -> bool:
    pane = shown.page.locator("#graph").bounding_box()
    assert pane is not None
    return (
        box["x"] >= pane["x"]
        and box["y"] >= pane["y"]
        and box["x"] + box["width"] <= pane["x"] + pane["width"]
        and box["y"] + box["height"] <= pane["y"] + pane["height"]
    )


@pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
@pytest.mark.parametrize("stage", ["export", "recognize_sparse_attention", "overlap_streams"])
def test_fit_shows_the_whole_graph(shown: Report, size: dict[str, int], stage: str) -> None:
    shown.page.set_viewport_size(size)
    region = "moe.long" if stage == "overlap_streams" else "moe"
    shown.open(**{"pass": stage, "region": region, "view": "graph"})
    shown.page.locator("#fit").click()
    found = boxes(shown, "#graph .node > rect")
    assert len(found) > 10
    assert all(on_screen(shown, box) for box in found)
    assert shown.page.locator("#map").is_hidden()


def test_it_opens_where_it_can_be_read_and_the_map_shows_where_that_is(shown: Report) -> None:
    shown.open(**ATTENTION)
    assert shown.page.evaluate("camera.scale") >= 0.8
    made = boxes(shown, "#graph .node.new > rect")
    assert any(on_screen(shown, box) for box in made)
    assert shown.page.locator("#map").is_visible()
    area = shown.page.locator("#map").bounding_box()
    assert area is not None
    before = shown.page.evaluate("camera.y")
    shown.page.mouse.click(area["x"] + area["width"] / 2, area["y"] + area["height"] - 8)
    assert shown.page.evaluate("camera.y") < before
    last = named_boxes(shown)["output"]
    assert on_screen(shown, last)


def test_buttons_keys_and_the_wheel_zoom(shown: Report) -> None:
    shown.open(**ATTENTION)
    scale = "camera.scale"
    at = shown.page.evaluate(scale)
    shown.page.locator("#zoom-in").click()
    assert shown.page.evaluate(scale) == pytest.approx(1.3 * at)
    shown.page.keyboard.press("-")
    assert shown.page.evaluate(scale) == pytest.approx(at)
    shown.page.locator("#zoom-out").click()
    assert shown.page.evaluate(scale) < at
    shown.page.locator("#scale").click()
    assert shown.page.evaluate(scale) == pytest.approx(1)
    assert shown.page.locator("#scale").inner_text() == "100 %"
    # what is under the pointer stays there
    node = shown.page.locator("#graph .node.new > rect").first
    box = node.bounding_box()
    assert box is not None
    shown.page.mouse.move(box["x"] + 1, box["y"] + 1)
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -200)
    shown.page.keyboard.up("Control")
    until(shown.page, "camera.scale > 1.2")
    moved = node.bounding_box()
    assert moved is not None
    assert moved["x"] == pytest.approx(box["x"], abs=3)
    at, y = shown.page.evaluate("[camera.scale, camera.y]")
    shown.page.mouse.wheel(0, 120)
    until(shown.page, f"camera.y !== {y}")
    assert shown.page.evaluate("[camera.scale, camera.y]") == [at, y - 120]


def test_two_fingers_zoom(shown: Report) -> None:
    shown.page.set_viewport_size(PHONE)
    shown.open(**ATTENTION)
    touch = shown.page.context.new_cdp_session(shown.page)
    at, x, y = shown.page.evaluate("[camera.scale, camera.x, camera.y]")

    def fingers(kind: str, *points: tuple[int, int]) -> None:
        data = [{"x": x, "y": y, "id": i} for i, (x, y) in enumerate(points)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": data})

    fingers("touchStart", (150, 600))
    fingers("touchStart", (150, 600), (250, 600))
    fingers("touchMove", (100, 600), (300, 600))
    fingers("touchEnd")
    assert shown.page.evaluate("camera.scale") == pytest.approx(2 * at, rel=0.02)
    pane = shown.page.locator("#graph").bounding_box()
    assert pane is not None
    # the point between the fingers stays
    middle = [(200 - pane["x"] - x) / at, (600 - pane["y"] - y) / at]
    now = shown.page.evaluate("[camera.x, camera.y, camera.scale]")
    assert [now[0] + now[2] * middle[0], now[1] + now[2] * middle[1]] == pytest.approx(
        [200 - pane["x"], 600 - pane["y"]], abs=3
    )


_KEPT = """() => {
  const [before, after] = ["before", "after"].map((side) => {
    showSide(side);
    return new Map(drawn.map(({ node, shape }) => [node.key, shape.getAttribute("transform")]));
  });
  const kept = [...before.keys()].filter((key) => after.has(key));
  return { kept: kept.length, moved: kept.filter((key) => before.get(key) !== after.get(key)),
    gone: before.size - kept.length };
}"""


@pytest.mark.parametrize("name", ["recognize_sparse_attention", "token_major", "merge_projections"])
def test_what_stays_does_not_move_between_before_and_after(shown: Report, name: str) -> None:
    shown.open(**{"pass": name, "region": "moe", "view": "graph"})
    found = shown.page.evaluate(_KEPT)
    assert found["kept"] > 20
    assert found["gone"] > 0
    assert found["moved"] == []


# all layouts as data: boxes that overlap, edges that lead upwards, edges behind a box
_LAYOUTS = """() => {
  const found = { drawings: 0, overlaps: [], upwards: [], behind: [] };
  const overlap = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width &&
    a.y < b.y + b.height && b.y < a.y + a.height;
  const inside = ({ x, y }, box) => overlap({ x, y, width: 0, height: 0 },
    { x: box.x + 0.5, y: box.y + 0.5, width: box.width - 1, height: box.height - 1 });
  const bend = (a, b, t) => ({
    x: a.x + (b.x - a.x) * (3 - 2 * t) * t * t,
    y: a.y + (b.y - a.y) * (1.5 - 1.5 * t + t * t) * t,
  });
  const check = (where, nodes, drawing) => {
    found.drawings += 1;
    const byName = new Map(nodes.map((node) => [node.id, node]));
    nodes.forEach((one, index) => nodes.slice(index + 1).forEach((other) => {
      if (overlap(one, other)) found.overlaps.push(`${where} ${one.id} ${other.id}`);
    }));
    for (const node of nodes) for (const { from } of edgesOf(node)) {
      const name = `${where} ${from} ${node.id}`;
      const points = drawing.route(byName.get(from).key, node.key);
      points.slice(1).forEach((point, index) => {
        if (point.y < points[index].y) found.upwards.push(name);
        for (let t = 0; t <= 1; t += 0.1) {
          const at = bend(points[index], point, t);
          if (nodes.some((box) => inside(at, box))) found.behind.push(name);
        }
      });
    }
  };
  STAGES.forEach((stage, number) => {
    for (const region of Object.keys(number ? stage.changed : stage.graphs)) {
      for (const inputs of [false, true]) {
        state.inputs = inputs;
        const { nodes, drawing } = layoutOf(number, region);
        for (const side of ["before", "after"]) {
          check(`${stage.name} ${region} ${side}`, nodes[side], drawing);
        }
      }
    }
  });
  return found;
}"""


def test_no_box_overlaps_and_no_edge_runs_behind_one(shown: Report) -> None:
    shown.open(**ATTENTION)
    found: dict[str, Any] = shown.page.evaluate(_LAYOUTS)
    assert found["drawings"] > 200
    assert sorted(set(found["overlaps"])) == []
    assert sorted(set(found["upwards"])) == []
    assert sorted(set(found["behind"])) == []


def test_text_fits_its_box(shown: Report) -> None:
    for place in (ATTENTION, STREAMS):
        shown.open(**place)
        shown.page.keyboard.press("0")
        wide = shown.page.eval_on_selector_all(
            "#graph .node",
            """nodes => nodes.filter(node => {
              const right = one => one.getBBox().x + one.getBBox().width;
              const texts = [...node.querySelectorAll("text:not(.heat)")];
              return Math.max(...texts.map(right)) > right(node.querySelector("rect"));
            }).map(node => node.textContent)""",
        )
        assert wide == []
        assert "…" not in "".join(shown.page.locator("#graph .node text").all_text_contents())
