"""Whose machine code a launch runs, with a driver that only notes what it is given."""

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from dsa_compile.kernels.cuda import launch
from dsa_compile.kernels.cuda.compiler import cubin_name
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.shipped import NO_KERNELS, ShippedKernels, kernels_in_use

DEFINES = {"CHUNKS": 7}
BUILT = b"compiled here"


class Driver:
    """Functions are the machine code that they were loaded from; ``broken`` is refused."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUfunction_attribute = SimpleNamespace()

    def __init__(self):
        self.loaded, self.launched, self.broken = [], [], None

    def CUlaunchConfig(self):
        return SimpleNamespace()

    def cuLibraryLoadData(self, cubin, *_):
        if cubin == self.broken:
            return 1, None
        self.loaded.append(cubin)
        return 0, cubin

    def cuLibraryGetKernel(self, library, name):
        return 0, library

    def cuKernelGetFunction(self, kernel):
        return 0, kernel

    def cuLaunchKernelEx(self, config, function, *_):
        self.launched.append(function)
        return (0,)

    def cuOccupancyMaxActiveClusters(self, function, config):
        return 0, len(function)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(launch, "load_driver", lambda: driver)
    monkeypatch.setattr(launch, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(launch, "build", lambda source, **_: BUILT)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return driver


@pytest.fixture
def kernel():
    return CudaKernel("head_weights.cu", "head_weights", DEFINES)


def shipped(code):
    return ShippedKernels({cubin_name("head_weights.cu", arch="sm_90a", defines=DEFINES): code})


def run(kernel, owner):
    with owner.in_use():
        kernel((1, 1, 1), 32)


def test_every_owner_launches_its_own_machine_code(driver, kernel):
    mine, theirs = shipped(b"mine"), shipped(b"theirs")
    for _ in range(2):
        run(kernel, mine)
        kernel((1, 1, 1), 32)
        run(kernel, theirs)
        run(kernel, NO_KERNELS)
    assert driver.launched == [b"mine", BUILT, b"theirs", BUILT] * 2
    assert driver.loaded == [b"mine", BUILT, b"theirs"]
    run(kernel, shipped(b"mine"))  # the same content, read from somewhere else
    assert len(driver.loaded) == 3


def test_an_owner_without_the_kernel_compiles_it(driver, kernel):
    run(kernel, ShippedKernels({"another": b"mine"}))
    driver.broken = b"of a newer compiler"
    run(kernel, shipped(driver.broken))
    assert driver.launched == [BUILT, BUILT]


def test_residency_is_that_of_the_owners_machine_code(driver, kernel):
    def resident(owner):
        with owner.in_use():
            return kernel.resident_clusters(32, (1, 1, 1))

    assert [resident(shipped(b"mine")), resident(NO_KERNELS)] == [len(b"mine"), len(BUILT)]


def test_nothing_is_in_use_outside_of_a_block_nor_in_other_threads():
    mine, seen = shipped(b"mine"), []
    with mine.in_use():
        assert kernels_in_use() is mine
        thread = threading.Thread(target=lambda: seen.append(kernels_in_use()))
        thread.start()
        thread.join()
        with NO_KERNELS.in_use():
            assert kernels_in_use() is NO_KERNELS
        assert kernels_in_use() is mine
    assert seen == [NO_KERNELS]
    with suppress(KeyError), mine.in_use():
        raise KeyError
    assert kernels_in_use() is NO_KERNELS


def test_equal_contents_have_equal_digests():
    first = ShippedKernels({"a": b"1", "b": b"2"})
    assert first.digest == ShippedKernels({"b": b"2", "a": b"1"}).digest
    others = ({"a": b"2", "b": b"1"}, {"a": b"1"}, {"a": b"1", "c": b"2"}, {})
    assert len({first.digest, *(ShippedKernels(other).digest for other in others)}) == 5
