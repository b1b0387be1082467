"""A page of a browser that shows a report."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

LINE = {"x": 8, "y": 6}  # within a line of code, beside its words
LAPTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}


class Report:
    """A page that shows a report."""

    def __init__(self, page: "Page", path: Path) -> None:
        self.page = page
        self.path = path
        self.faults: list[str] = []
        self.requests: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("console", lambda message: self.faults.append(message.text))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, **place: str) -> None:
        """Open at a place, and wait until it is shown."""
        fields = "&".join(f"{key}={value}" for key, value in place.items())
        self.page.goto("about:blank")
        self.page.goto(f"file://{self.path}#{fields}")
        self.page.wait_for_selector("html[data-ready]")

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate("({...state, pass: STAGES[state.stage].name})")
        return found

    def names(self, side: str, marked: str) -> set[str]:
        """Names that the marked lines of one side define."""
        found = self.page.eval_on_selector_all(
            f".cell.{side}.{marked}", "cells => cells.flatMap(c => c.dataset.names.split(' '))"
        )
        return set(found)


def boxes(shown: Report, selector: str) -> list[dict[str, float]]:
    found = [locator.bounding_box() for locator in shown.page.locator(selector).all()]
    return [dict(box) for box in found if box is not None]


def named_boxes(shown: Report) -> dict[str, dict[str, float]]:
    nodes = shown.page.locator("#graph .node")
    names = nodes.evaluate_all("nodes => nodes.map(n => n.dataset.name)")
    return dict(zip(names, boxes(shown, "#graph .node > rect"), strict=True))
