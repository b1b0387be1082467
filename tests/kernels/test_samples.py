"""The samples that kernels are watched on: one for every kernel, and each a legal call."""

import pytest
import torch

from dsa_compile.kernels.implementation import GPUS
from dsa_compile.ops import REFERENCE
from tests.kernels.samples import SAMPLES
from tests.kernels.sanitize import PLACES, astray, facts, kernels, launches

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


@pytest.mark.parametrize("kernel", OWN, ids=lambda kernel: f"{kernel.op}-{kernel.provider}")
def test_places_can_be_led_astray(kernel) -> None:
    """Places that a sample gives change, tensor by tensor; optional ones left out stay left out."""
    schema = getattr(torch.ops.dsa, kernel.op).default._schema.arguments
    for arguments in SAMPLES[kernel.op]():
        wrong = astray(kernel, arguments)
        given = [
            (argument.name, value)
            for argument, value in zip(schema, arguments, strict=False)
            if argument.name in PLACES and value is not None
        ]
        assert (wrong is not None) == bool(given)
        for argument, value, other in zip(schema, arguments, wrong or (), strict=False):
            if any(value is place for _, place in given):
                assert (other.shape, other.dtype) == (value.shape, value.dtype)
                assert (other == 1 << 30).any()
            else:
                assert other is value, argument.name


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS)
def test_the_launches_to_watch_can_be_listed(target: str) -> None:
    """Launches that ``python -m tests.kernels.sanitize`` runs, without running them."""
    names = [name for name, _ in launches(target)]
    assert len(names) == len(set(names))
    assert any(name.startswith("router/triton") and name.endswith("astray") for name in names)
