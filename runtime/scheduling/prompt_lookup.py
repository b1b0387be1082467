"""Drafts without a model: what followed the last tokens where they stood before in the request."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dsa_compile.runtime.scheduling.request import Request

# Tokens that must agree: more make for better drafts, fewer for more of them.
_LONGEST, _SHORTEST = 4, 2


def look_up_drafts(request: Request, most: int) -> int:
    """Put drafts behind a request's tokens.

    Args:
        request: its last token is known, and no step in flight computes it.
        most: drafts that are wanted.

    Returns:
        How many there are.
    """
    end = request.num_tokens
    assert request.num_scheduled == end - 1, "drafts are looked up between steps"
    tokens = request.token_ids[:end]
    for length in range(min(_LONGEST, end - 1), _SHORTEST - 1, -1) if most > 0 else ():
        before = sliding_window_view(tokens[:-1], length)
        (places,) = np.nonzero((before == tokens[end - length :]).all(1))
        if len(places):
            follow = int(places[-1]) + length
            found = tokens[follow : follow + most]
            request.token_ids[end : end + len(found)] = found
            return len(found)
    return 0
