"""Contents of files onto a GPU, through page-locked memory and by several threads at once.

A plain copy of a tensor that was read into ordinary memory takes longer than reading it: the driver
copies it once more, into page-locked memory of its own.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dsa_compile.weights.safetensors_file import SafetensorsFile

_THREADS = 4  # one reads some 5 GB/s from memory; the bus takes several times that
_SLAB = 32 << 20  # bytes read and copied at a time


class DeviceCopies:
    """Reads tensors of files into tensors of a device.

    Args:
        device: where the tensors are; on a CPU nothing is page-locked.
        slab: bytes read at a time.
    """

    def __init__(self, device: torch.device, slab: int = _SLAB) -> None:
        self._device, self._slab = device, slab
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(max_workers=_THREADS)

    def read(self, file: SafetensorsFile, key: str, out: Tensor) -> None:
        """Fill ``out``, contiguous and of the stored dtype, with tensor ``key``.

        Raises:
            UserError: the file cannot be read.
        """
        flat = out.view(-1)
        if self._device.type == "cuda":
            # what had this memory before may still be in use on the caller's stream
            torch.cuda.current_stream(self._device).synchronize()
        count = self._slab // out.itemsize
        starts = range(0, len(flat), count)
        parts = [self._pool.submit(self._part, file, key, flat, n, n + count) for n in starts]
        for part in parts:
            part.result()

    def _part(self, file: SafetensorsFile, key: str, flat: Tensor, start: int, stop: int) -> None:
        out = flat[start:stop]
        slab = self._buffer()[: out.nbytes].view(out.dtype)
        file.read_elements(key, start, slab)
        with contextlib.ExitStack() as entered:
            if self._device.type == "cuda":
                entered.enter_context(torch.cuda.stream(self._own.stream))
            out.copy_(slab, non_blocking=True)
        if self._device.type == "cuda":
            self._own.stream.synchronize()  # the slab is read into again

    def _buffer(self) -> Tensor:
        """Slab of the current thread."""
        if not hasattr(self._own, "slab"):
            on_gpu = self._device.type == "cuda"
            self._own.slab = torch.empty(self._slab, dtype=torch.uint8, pin_memory=on_gpu)
            if on_gpu:
                self._own.stream = torch.cuda.Stream(self._device)
        slab: Tensor = self._own.slab
        return slab
