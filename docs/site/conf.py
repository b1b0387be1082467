"""The docs as a site, made by Sphinx: ``make docs``.

Its pages are the Markdown files of the repository, and ``docs/api``.
"""

import re
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

project = "dsa-compile"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "docs/api/*.rst", "examples/**/*.md"]
html_theme = "furo"
html_title = project
html_extra_path = ["index.html"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # as on GitHub
suppress_warnings = ["misc.highlighting_failure"]  # shortened listings, with … in them
maximum_signature_line_length = 100
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
napoleon_use_ivar = True

# Sections of the side bar; a page in none of them is a warning, and so an error.
CONTENTS = {
    "Start": ["docs/glossary", "docs/structure", "docs/first-pass", "CONTRIBUTING", "CHANGELOG"],
    "Use": [
        *(
            "docs/models",
            "docs/cli",
            "docs/options",
            "docs/recipes",
            "docs/runtime",
            "docs/drafting",
            "docs/chat",
        ),
        *(
            "docs/serving",
            "docs/serve-deepseek-v3.2",
            "docs/serve-glm-5.2",
            "docs/parallelism",
            "docs/artifact",
            "docs/security",
            "docs/evaluation",
        ),
    ],
    "Python": ["docs/api/*"],
    "Look inside": [
        *("docs/debugging", "docs/kernels", "docs/kernels/*", "docs/overlap"),
        *("docs/performance", "docs/measurements"),
    ],
    "Examples": ["examples/**"],
    "Laboratory notes": ["docs/log/*"],
}


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the first page the site's contents, which the file itself need not show."""
    if page == root_doc:
        source[0] += "".join(
            f"\n:::{{toctree}}\n:hidden:\n:glob:\n:caption: {caption}\n\n"
            + "".join(f"{page}\n" for page in pages)
            + ":::\n"
            for caption, pages in CONTENTS.items()
        )


def shorten_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returned: str
) -> tuple[str | None, str | None]:
    """Drop the modules of types where a default that is no literal keeps autodoc from it."""
    shown = signature and re.sub(r"<(factory|function .*?<lambda>)>", "...", signature)
    return (shown if shown == signature else re.sub(r"~[\w.]+\.", "", shown)), returned


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-signature", shorten_signature)
