"""Puts data, style and scripts into one HTML document that needs nothing else."""

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

STYLES = ("base.css", "frame.css", "overview.css", "diff.css", "graph.css", "narrow.css")
# In this order: a script uses what those before it define.
SCRIPTS = (
    "dom.js", "model.js", "history.js", "state.js", "timeline.js", "details.js", "about.js",
    "overview.js", "rows.js", "diff.js", "layered.js", "layout.js", "graph.js", "camera.js",
    "search.js", "bar.js", "keys.js", "main.js",
)  # fmt: skip


def document(data: Mapping[str, Any]) -> str:
    """The report as text.

    Its policy forbids the browser to load or send anything, so it works from a file, and what an
    artifact contains cannot make it do otherwise.

    Args:
        data: of :func:`~dsa_compile.inspect.html.payload.payload`, with overlays.
    """
    # "<" would end the script, or begin a comment in it, wherever it stands in a string
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    parts = {
        "title": escape(f"{data['name']}: {data['target']}, {data['recipe']}"),
        "style": "".join(map(_static, STYLES)),
        "data": text.replace("<", "\\u003c"),
        "scripts": "\n".join(map(_static, SCRIPTS)),
    }
    page = _static("report.html")
    head, *rest = page.split("{{")
    pieces = [head]
    for piece in rest:
        name, _, tail = piece.partition("}}")
        pieces += [parts[name], tail]
    return "".join(pieces)


def _static(name: str) -> str:
    return files(__package__).joinpath("static", name).read_text(encoding="utf-8")
