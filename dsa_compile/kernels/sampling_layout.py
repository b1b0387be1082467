"""Layouts that sampling kernels and the host agree on."""

import numpy as np

MOST_TOP = 32
"""The most likeliest tokens that are listed of a row."""

MOST_COUNTED = 0x7FFF
"""A token's count in a request's output stays at this."""

IN_PROMPT = 0x8000
"""Bit of a token that is in the prompt, above its count in the output."""

ROW_OPTIONS = np.dtype(
    [
        ("place", np.int32),
        ("row", np.int32),
        ("pending", np.int32),
        ("bitmask", np.int32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
    ]
)
"""Changes to the logits of one row.

``place`` is its row of the logits; ``row`` its request's row of the tokens seen and of the last
tokens; ``pending`` 1 if the last token is not yet among the tokens seen; ``bitmask`` its row of the
bitmasks, or -1; the rest are its penalties.
"""

ROW_LOGPROBS = np.dtype(
    [
        ("logprob", np.float32),
        ("rank", np.int32),
        ("top_ids", np.int32, MOST_TOP),
        ("top_logprobs", np.float32, MOST_TOP),
    ]
)
"""Log-probabilities of one row: of its token, that token's rank, and the likeliest tokens."""


def words(layout: "np.dtype[np.void]") -> int:
    """Words of 32 bits in a record; kernels read and write these."""
    return layout.itemsize // 4
