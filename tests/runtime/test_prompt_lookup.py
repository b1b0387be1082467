"""Drafts looked up among a request's own tokens."""

import pytest

from dsa_compile.runtime.scheduling.prompt_lookup import look_up_drafts
from dsa_compile.runtime.scheduling.request import UNKNOWN_TOKEN, Request


def request_of(tokens, max_tokens=8):
    request = Request("r", tokens, max_tokens, stop_condition=None)
    request.reserve_output()
    request.num_scheduled = request.num_tokens - 1
    return request


@pytest.mark.parametrize(
    ("tokens", "most", "wanted"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], 3, [9, 8, 1]),
        ([1, 2, 3, 9, 8, 1, 2, 3], 1, [9]),
        ([1, 2, 3, 9, 8, 1, 2, 3], 0, []),
        ([2, 3, 7, 2, 3, 9, 2, 3], 2, [9, 2]),  # the latest of equally long matches
        ([1, 2, 3, 7, 5, 2, 3, 9, 1, 2, 3], 1, [7]),  # the longest match
        ([4, 4, 4], 3, [4]),  # what follows ends with the request
        ([3, 9, 3], 3, []),  # one token alone says nothing
        ([5, 6], 3, []),
        ([5], 3, []),
    ],
)
def test_what_followed_the_last_tokens_before_is_drafted(tokens, most, wanted):
    request = request_of(tokens)
    assert look_up_drafts(request, most) == len(wanted)
    end = len(tokens)
    assert request.token_ids[end : end + len(wanted)].tolist() == wanted
    assert request.token_ids[end + len(wanted)] == UNKNOWN_TOKEN
    assert request.num_tokens == end
