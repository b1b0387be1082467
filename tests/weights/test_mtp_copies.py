"""Copies of embedding and head that lie beside an MTP layer: equal by value, or refused."""

from types import SimpleNamespace

import pytest
import torch

from dsa_compile.errors import CheckpointError
from dsa_compile.weights.mtp_copies import require_equal


def reader(**stored):
    def read_into(name, out, window):
        out.copy_(stored[name][window])

    return SimpleNamespace(
        shape=lambda name: tuple(stored[name].shape),
        stored_dtype=lambda name: stored[name].dtype,
        read_into=read_into,
    )


@pytest.mark.parametrize("copied", [torch.bfloat16, torch.float32, torch.float16])
def test_types_may_differ(copied):
    original = torch.randn(5000, 4).to(torch.float8_e4m3fn).bfloat16()  # exact in all of them
    copy = original.to(copied, copy=True)
    require_equal(reader(copy=copy, original=original), "copy", "original")
    copy[4999, 3] += 1
    with pytest.raises(CheckpointError, match=r"'copy' differs from 'original'"):
        require_equal(reader(copy=copy, original=original), "copy", "original")


def test_a_copy_that_was_rounded_differs():
    original = torch.randn(8, 4)
    with pytest.raises(CheckpointError, match="differs"):
        require_equal(reader(copy=original.bfloat16(), original=original), "copy", "original")
