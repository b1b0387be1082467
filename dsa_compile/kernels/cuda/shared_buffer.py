"""Buffers in GPU memory that processes of one machine map from each other.

CUDA's virtual memory functions make memory that a file descriptor stands for; another process maps
it by that descriptor, and its kernels then load and store there over NVLink or PCIe.
"""

import contextlib
import os
from typing import Any

import torch

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.driver import checked, load_driver


class SharedBuffer:
    """Zeros on the current GPU, which other processes may map, and what those have made.

    Args:
        nbytes: at least so many.

    Raises:
        UserError: the driver refuses, for want of memory or of a GPU that can.
    """

    def __init__(self, nbytes: int) -> None:
        self._driver = load_driver()
        self._device = torch.cuda.current_device()
        self._mapped: list[tuple[int, Any]] = []
        torch.cuda.synchronize()  # makes the device's context, if there is none
        prop = self._properties()
        unit = self._checked(
            self._driver.cuMemGetAllocationGranularity(
                prop,
                self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        self.nbytes = -(-nbytes // unit) * unit
        """Bytes of this buffer and of each that is mapped, in the device's units."""
        self._handle = self._checked(self._driver.cuMemCreate(self.nbytes, prop, 0))
        self.address = self._map(self._handle)
        """Address of its own buffer in this process."""
        try:
            self._checked(self._driver.cuMemsetD8(self.address, 0, self.nbytes))
            torch.cuda.synchronize()
        except Exception:
            self.close()
            raise

    def descriptor(self) -> int:
        """A new file descriptor of the buffer, which the caller closes.

        Raises:
            UserError: the driver refuses.
        """
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._checked(self._driver.cuMemExportToShareableHandle(self._handle, kind, 0)))

    def map(self, descriptor: int) -> int:
        """Map a buffer of as many bytes that another process has made.

        Args:
            descriptor: of that buffer, received from the process; it is closed.

        Returns:
            Where this process finds it, until :meth:`close`.

        Raises:
            UserError: the GPUs cannot reach each other's memory, or the driver refuses otherwise.
        """
        kind = self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        try:
            imported = self._driver.cuMemImportFromShareableHandle(descriptor, kind)
        finally:
            os.close(descriptor)
        return self._map(self._checked(imported))

    def close(self) -> None:
        """Unmap all buffers; the memory is freed when nobody maps it. Again does nothing.

        Nothing else does that: a garbage collector that waits for the device would end the capture
        of a CUDA graph.
        """
        mapped, self._mapped = self._mapped, []
        if not mapped:
            return
        with contextlib.suppress(RuntimeError):  # a kernel failed: what it used is gone with it
            torch.cuda.synchronize(self._device)
        for address, handle in reversed(mapped):
            self._unmap(address, handle)

    def _map(self, handle: Any) -> int:
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location = self._properties().location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        address = 0
        try:
            address = int(self._checked(driver.cuMemAddressReserve(self.nbytes, 0, 0, 0)))
            self._checked(driver.cuMemMap(address, self.nbytes, 0, handle, 0))
            self._checked(driver.cuMemSetAccess(address, self.nbytes, [access], 1))
        except UserError:
            self._unmap(address, handle)
            raise
        self._mapped.append((address, handle))
        return address

    def _unmap(self, address: int, handle: Any) -> None:
        """Undo what :meth:`_map` did, all or a part of it: the driver refuses what was not done."""
        self._driver.cuMemUnmap(address, self.nbytes)
        self._driver.cuMemAddressFree(address, self.nbytes)
        self._driver.cuMemRelease(handle)

    def _properties(self) -> Any:
        driver = self._driver
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self._device
        prop.requestedHandleTypes = (
            driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        return prop

    def _checked(self, result: tuple[Any, ...]) -> Any:
        return checked(self._driver, result, "memory that GPUs share")
