"""Drafts that an engine's steps checked, held to what they should have been, and what was kept."""

from collections.abc import Mapping, Sequence

from dsa_compile.verify.execution.exact_runner import CheckedDrafts


def drafts_problem(
    ids: Sequence[int],
    length: int,
    chains: Mapping[int, Sequence[int]] | None,
    checked: Sequence[CheckedDrafts],
) -> str:
    """Problem of a request's drafts; empty if there is none.

    A step keeps as many drafts as are right, up to the first wrong one, and the next step begins
    behind them: if it keeps fewer, drafting gains less; if more, tokens are not the model's.

    Args:
        ids: its prompt and its answer.
        length: tokens of the prompt; at least three follow it.
        chains: what should be drafted, by the position of its last token; None for anything.
        checked: of the engine, where no other request has its last token at these positions.
    """
    mine = {one.end: one.tokens for one in checked if length <= one.end < len(ids) - 1}
    if chains is not None and not any(mine.values()):
        return "no draft was checked"
    for end, drafts in sorted(mine.items()):
        if chains is not None:
            for depth, (made, wanted) in enumerate(zip(drafts, chains[end], strict=False), 1):
                if made != wanted:
                    return f"draft {depth} behind token {end - length + 1} is {made}, not {wanted}"
        right = 0
        while right < len(drafts) and drafts[right] == ids[end + 1 + right]:
            right += 1
        behind = [later for later in mine if later > end]
        if behind and min(behind) != end + right + 1:
            kept = min(behind) - end - 1
            return f"of the drafts behind token {end - length + 1} {kept} are kept, not {right}"
    return ""
