"""Buffers that processes map from each other: what the driver is called for, without a GPU."""

import gc
import os
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings")

from cuda.bindings import driver

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda import shared_buffer
from dsa_compile.kernels.cuda.shared_buffer import SharedBuffer

UNIT = 2 << 20


class Driver:
    """Counts what is mapped and freed; types and constants are the driver's."""

    def __init__(self) -> None:
        self.handles, self.reserved, self.mapped, self.open = 0, {}, {}, set()
        self.zeroed: list[tuple[int, int]] = []
        self.access: list[tuple[int, int]] = []
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def _done(self, name: str, *results: Any) -> tuple[Any, ...]:
        status = driver.CUresult.CUDA_SUCCESS
        if name == self.failing:
            status = driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
        return (status, *results)

    def cuMemGetAllocationGranularity(self, prop, option):
        assert prop.location.id == 3
        return self._done("granularity", UNIT)

    def cuMemCreate(self, size, prop, flags):
        kinds = driver.CUmemAllocationHandleType
        assert prop.requestedHandleTypes == kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return self._opened("create")

    def _opened(self, name: str):
        if self.failing == name:
            return self._done(name, 0)
        self.handles += 1
        self.open.add(self.handles)
        return self._done(name, self.handles)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        assert handle in self.open
        return self._done("export", os.memfd_create("buffer"))

    def cuMemImportFromShareableHandle(self, descriptor, kind):
        os.fstat(descriptor)  # it is open
        return self._opened("import")

    def cuMemAddressReserve(self, size, alignment, address, flags):
        found = (1 + len(self.reserved)) << 30
        if self.failing == "reserve":
            return self._done("reserve", 0)
        self.reserved[found] = size
        return self._done("reserve", found)

    def cuMemMap(self, address, size, offset, handle, flags):
        assert self.reserved[address] == size
        if self.failing != "map":
            self.mapped[address] = handle
        return self._done("map")

    def cuMemSetAccess(self, address, size, access, count):
        assert len(access) == count == 1
        self.access.append((address, access[0].location.id))
        return self._done("access")

    def cuMemsetD8(self, address, value, size):
        assert address in self.mapped
        assert value == 0
        self.zeroed.append((address, size))
        return self._done("memset")

    def cuMemUnmap(self, address, size):
        self.mapped.pop(address, None)
        return self._done("unmap")

    def cuMemAddressFree(self, address, size):
        assert address not in self.mapped
        assert self.reserved.pop(address, size) == size
        return self._done("free")

    def cuMemRelease(self, handle):
        self.open.remove(handle)
        return self._done("release")


@pytest.fixture
def fake(monkeypatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(shared_buffer, "load_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    return made


def test_a_buffer_is_of_whole_units_and_zeros(fake: Driver) -> None:
    buffer = SharedBuffer(UNIT + 1)
    assert buffer.nbytes == 2 * UNIT
    assert fake.zeroed == [(buffer.address, 2 * UNIT)]
    assert fake.access == [(buffer.address, 3)]


def test_others_are_mapped_for_this_gpu(fake: Driver) -> None:
    buffer = SharedBuffer(1)
    descriptor = buffer.descriptor()
    other = buffer.map(descriptor)
    assert other != buffer.address
    assert fake.access == [(buffer.address, 3), (other, 3)]
    assert fake.zeroed == [(buffer.address, UNIT)]  # the other's is its owner's to fill
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def nothing_is_left(fake: Driver) -> bool:
    return not (fake.mapped or fake.reserved or fake.open)


def test_closing_leaves_nothing(fake: Driver) -> None:
    buffer = SharedBuffer(1)
    buffer.map(buffer.descriptor())
    assert len(fake.mapped) == len(fake.open) == 2
    buffer.close()
    assert nothing_is_left(fake)
    buffer.close()


def test_only_closing_frees(fake: Driver) -> None:
    """The garbage collector may run while a graph is captured, and must not wait for the GPU."""
    buffer = SharedBuffer(1)
    del buffer
    gc.collect()
    assert len(fake.mapped) == 1


@pytest.mark.parametrize("failing", ["create", "reserve", "map", "access", "memset"])
def test_a_buffer_that_cannot_be_made_leaves_nothing(fake: Driver, failing: str) -> None:
    fake.failing = failing
    with pytest.raises(UserError, match="memory that GPUs share: CUDA_ERROR_NOT_SUPPORTED"):
        SharedBuffer(1)
    assert nothing_is_left(fake)


@pytest.mark.parametrize("failing", ["import", "reserve", "map", "access"])
def test_another_rank_that_cannot_be_mapped_leaves_nothing(fake: Driver, failing: str) -> None:
    buffer = SharedBuffer(1)
    descriptor = buffer.descriptor()
    fake.failing = failing
    with pytest.raises(UserError, match="memory that GPUs share: CUDA_ERROR_NOT_SUPPORTED"):
        buffer.map(descriptor)
    assert len(fake.mapped) == len(fake.open) == 1
    buffer.close()
    assert nothing_is_left(fake)
