"""The samples that kernels are watched on: one for every kernel, and each a legal call."""

import pytest
import torch

from dsa_compile.kernels.implementation import GPUS
from dsa_compile.ops import REFERENCE
from tests.kernels.samples import SAMPLES
from tests.kernels.sanitize import facts, kernels

OWN = list({kernel.function: kernel for target in GPUS for kernel in kernels(target)}.values())


@pytest.mark.parametrize("op", sorted({kernel.op for kernel in OWN}))
def test_the_reference_takes_every_sample(op: str) -> None:
    torch.manual_seed(0)
    for arguments in SAMPLES[op]():
        REFERENCE[getattr(torch.ops.dsa, op).default](*arguments)


@pytest.mark.parametrize("kernel", OWN, ids=lambda kernel: f"{kernel.op}-{kernel.provider}")
def test_every_kernel_takes_a_sample(kernel) -> None:
    refusals = [kernel.refusal(facts(kernel, arguments)) for arguments in SAMPLES[kernel.op]()]
    assert None in refusals, refusals
