"""Random numbers that a test draws without a seed of its own.

They follow from the test's name, so that neither the tests before it in the same process nor how
many processes there are decide what it draws. ``DSA_TEST_SEED=N`` draws others.
"""

import os
import random
import zlib
from typing import Any

import numpy as np
import pytest
import torch

_SEED = os.environ.get("DSA_TEST_SEED", "0")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> None:
    parameter = getattr(request, "param_index", 0)
    _seed(f"{fixturedef.baseid} {fixturedef.argname} {parameter}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    _seed(pyfuncitem.nodeid)


def _seed(name: str) -> None:
    seed = zlib.crc32(f"{_SEED} {name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
