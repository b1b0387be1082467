"""Purpose of a pass, from its docstring."""

import pytest

from dsa_compile.inspect.about import About, Drawing, Prose, parse_about
from dsa_compile.ir.passes import Pass
from dsa_compile.passes.pipeline import PIPELINE

PASSES = [step for step in PIPELINE if isinstance(step, Pass)]


def test_two_sides() -> None:
    about = parse_about(
        """Fuse a scaling with its norm.

Before::                    After::

    y = mul(x, scale)           n = dsa.scaled_rms_norm(
    n = dsa.rms_norm(y)                 x, scale)

The sum is rounded
first.

Declines: a ``scale`` that is a tensor."""
    )
    assert about == About(
        "Fuse a scaling with its norm.",
        (
            Drawing(
                "Before",
                "y = mul(x, scale)\nn = dsa.rms_norm(y)",
                "After",
                "n = dsa.scaled_rms_norm(\n        x, scale)",
            ),
            Prose("The sum is rounded first."),
            Prose("Declines: a ``scale`` that is a tensor."),
        ),
    )


def test_a_line_too_long_for_its_side_belongs_to_it() -> None:
    [drawing] = parse_about(
        "P.\n\nBefore (angles)::   After::\n\n"
        "    y = add(mul(x, c), mul(r, s))\n    z = y               z = x"
    ).rest
    assert drawing == Drawing(
        "Before (angles)", "y = add(mul(x, c), mul(r, s))\nz = y", "After", "\nz = x"
    )


@pytest.mark.parametrize(
    "text", ["", "One line.", "::", "a\n\n    b", "a\n\nb::", "Before::  After::"]
)
def test_any_text_is_one(text: str) -> None:
    assert parse_about(text).purpose == " ".join(text.partition("\n")[0].split())


@pytest.mark.parametrize("step", PASSES, ids=lambda step: step.name)
def test_every_pass_has_a_purpose_and_a_drawing(step: Pass) -> None:
    about = parse_about(step.about)
    assert about.purpose.endswith(".")
    drawings = [part for part in about.rest if isinstance(part, Drawing)]
    assert drawings
    told = "".join(part.title + part.text + part.title_after + part.text_after for part in drawings)
    lost = [word for word in step.about.replace("::", "").split() if "dsa." in word]
    prose = " ".join(part.text for part in about.rest if isinstance(part, Prose))
    assert all(word in told + prose + about.purpose for word in lost)
    for drawing in drawings:
        assert drawing.title_after or not drawing.title.startswith("Before")
        if drawing.title_after:
            assert drawing.text.strip()
            assert drawing.text_after.strip()
