"""Faults of the runtime where it drafts with an artifact's own plans."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="right-behind-a-wrong-draft",
        about="drafts count that are right though one before them was wrong",
        file="runtime/execution/draft_rows.py",
        old="kept = 1 + right.long().cumprod(1).sum(1)",
        new="kept = 1 + right.long().sum(1)",
        kind="runtime",
        culprit="draft_rows",
        model="trained",
        options=(("draft", "mtp"),),
    ),
    Fault(
        id="deeper-drafts-a-row-ahead",
        about="deeper drafts stand one position, and one cache row, too far",
        file="runtime/execution/draft_rows.py",
        old="positions = (rows.start + (depth - 2)).masked_fill(unwanted, 0)",
        new="positions = (rows.start + (depth - 1)).masked_fill(unwanted, 0)",
        kind="runtime",
        culprit="draft_rows",
        model="trained",
        options=(("draft", "mtp"),),
    ),
    Fault(
        id="states-kept-by-order",
        about="states of drafts are kept by a request's place in the step, and read by its row",
        file="runtime/execution/drafter.py",
        old="            states[rows.rows] = first[key]\n",
        new="            states[: len(ends)] = first[key]\n",
        kind="runtime",
        culprit="drafter",
        model="trained",
        options=(("draft", "mtp"),),
    ),
)
