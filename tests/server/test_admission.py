"""Requests and prompt tokens that may wait."""

from contextlib import ExitStack

import pytest

from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.server.admission import Admission
from dsa_compile.server.errors import ApiError

LIMITS = SchedulerConfig(
    num_blocks=10, block_size=4, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=400
)


def test_requests_and_tokens_beyond_the_limits_are_refused_until_others_have_ended():
    admission = Admission(max_queued=3, max_queued_tokens=60)
    with ExitStack() as held:
        held.enter_context(admission.admit(2, 100, LIMITS))
        for count, tokens in ((1, 1), (4, 0)):
            with pytest.raises(ApiError) as refused, admission.admit(count, tokens, LIMITS):
                pass
            assert (refused.value.status, refused.value.code) == (429, "queue_full")
        held.enter_context(admission.admit(3, 0, LIMITS))
    with admission.admit(1, 60, LIMITS), admission.admit(1, 40, LIMITS):
        assert admission.admitted == 2


def test_alone_a_request_may_have_more_than_may_wait():
    admission = Admission(max_queued=0, max_queued_tokens=0)
    with admission.admit(9, 400, LIMITS):
        assert admission.admitted == 9
