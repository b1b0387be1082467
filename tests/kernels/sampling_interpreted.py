"""Run by test_sampling_options.py in a process of its own: the kernels under Triton's interpreter.

Prints one line a case: its name, and "equal" or the largest error against the CPU's version.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from dsa_compile.kernels.triton import logit_options, row_logprobs
from dsa_compile.runtime.sampling import changed_rows
from dsa_compile.runtime.sampling import logprobs as reference
from tests.kernels.interpreter import round_as_hardware
from tests.kernels.sampling_samples import described, entries, problem


def check_changes(rows, vocab, dtype):
    given = problem(rows, vocab, dtype)
    got, want = torch.full((2, rows + 1, vocab), 7.0)
    logit_options.change_rows(*given, got)
    changed_rows.change_rows(*given, want)
    same = np.array_equal(got.numpy().view(np.int32), want.numpy().view(np.int32))
    assert (got[rows] == 7.0).all(), "a row too many"
    print("change", rows, vocab, dtype, "equal" if same else (got - want).abs().max().item())


def check_entries(rows, vocab):
    got, want = torch.full((2, rows, vocab), -3, dtype=torch.int16)
    logit_options.store_seen(got, *entries(rows, vocab))
    changed_rows.store_seen(want, *entries(rows, vocab))
    print("store", rows, vocab, "equal" if torch.equal(got, want) else "differs")


def check_logprobs(rows, vocab, dtype, top):
    given = described(rows, vocab, dtype)
    got = row_logprobs.row_logprobs(*given, top).numpy().copy()
    want = reference.row_logprobs(*given, top).numpy()
    alternatives = [min(top, vocab)] * rows
    tokens = given[3][given[2].long()].tolist()
    for a, b in zip(
        reference.read_logprobs(got, tokens, alternatives),
        reference.read_logprobs(want, tokens, alternatives),
        strict=True,
    ):
        assert (a.token_id, a.rank) == (b.token_id, b.rank)
        assert [t for t, _ in a.top] == [t for t, _ in b.top]
        np.testing.assert_allclose(a.logprob, b.logprob, atol=1e-5)
        np.testing.assert_allclose([v for _, v in a.top], [v for _, v in b.top], atol=1e-5)
    print("logprobs", rows, vocab, dtype, top, "equal")


if __name__ == "__main__":
    round_as_hardware()
    check_changes(5, 1100, torch.float32)
    check_changes(3, 33, torch.bfloat16)
    check_entries(4, 300)
    check_logprobs(4, 5000, torch.float32, 20)
    check_logprobs(5, 700, torch.bfloat16, 32)
    check_logprobs(4, 20, torch.float32, 32)
    check_logprobs(4, 300, torch.float32, 0)
