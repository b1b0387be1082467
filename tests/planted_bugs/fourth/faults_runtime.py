"""Faults of the runtime: blocks and sampling."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="repetition-forgets-the-prompt",
        about="the repetition penalty sees what was generated, and not the prompt",
        file="runtime/sampling/sampler.py",
        old="self.counts = TokenCounts(prompt_ids if self.penalties[0] != 1.0 else ())",
        new="self.counts = TokenCounts(())",
        kind="runtime",
        culprit="sampler",
        recipe="fp8",
    ),
    Fault(
        id="min-p-of-the-batch",
        about="every row of a batch is cut at the largest min_p in it",
        file="runtime/sampling/draw.py",
        old="floor = min_p.log().to(scaled.dtype)[:, None]",
        new="floor = min_p.max().log().to(scaled.dtype)",
        kind="runtime",
        culprit="draw",
    ),
    Fault(
        id="grown-block-one-column-late",
        about="a request's new block is counted before its column of the table is chosen",
        file="runtime/scheduling/residency.py",
        old=(
            "            self.block_rows[request.row, len(request.blocks)] = block\n"
            "            request.blocks.append(block)\n"
        ),
        new=(
            "            request.blocks.append(block)\n"
            "            self.block_rows[request.row, len(request.blocks)] = block\n"
        ),
        kind="runtime",
        culprit="residency",
        recipe="bf16",
    ),
)
