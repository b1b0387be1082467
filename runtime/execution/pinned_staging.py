"""A step's small arrays on their way to the GPU: packed into pinned memory, copied at once.

The copy is asynchronous, so the pinned memory must stay as it is until it is done. A ring of
buffers, each guarded by an event, lets the host fill the next while earlier ones are in flight.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 256  # of every array, as torch's own allocations

Views = TypeVar("Views", covariant=True)

_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True)
class Place:
    """Place of an array in a packed buffer."""

    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def in_numpy(self, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """The array's view of a packed buffer on the host."""
        return np.ndarray(self.shape, self.dtype, buffer, self.start)

    def in_torch(self, buffer: Tensor) -> Tensor:
        """The array's view of a packed buffer."""
        part = buffer[self.start : self.start + self.nbytes]
        return part.view(_TORCH[self.dtype]).view(self.shape)


class Layout:
    """Arrays one after another in one buffer, each at a multiple of 256 bytes.

    Args:
        arrays: shape and dtype (int32 or int64) of each by name.
    """

    def __init__(self, arrays: Mapping[str, tuple[Sequence[int], Any]]) -> None:
        self.places: dict[str, Place] = {}
        end = 0
        for name, (shape, dtype) in arrays.items():
            kind = np.dtype(dtype)
            nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
            self.places[name] = Place(end, nbytes, tuple(shape), kind)
            end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = max(end, _ALIGNMENT)

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> "Layout":
        """The layout that takes these arrays."""
        return cls({name: (array.shape, array.dtype) for name, array in arrays.items()})

    def in_numpy(self, buffer: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Views of a packed buffer on the host, by name."""
        return {name: place.in_numpy(buffer) for name, place in self.places.items()}

    def in_torch(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of a packed buffer, by name."""
        return {name: place.in_torch(buffer) for name, place in self.places.items()}


class Staged(Protocol[Views]):
    """Arrays that are sent in one size again and again."""

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        ...

    def in_numpy(self, buffer: NDArray[np.uint8]) -> Views:
        """Views through which a buffer on the host is filled."""
        ...


class _Slot:
    def __init__(self, nbytes: int) -> None:
        self.copied: torch.cuda.Event | None = None
        self.make(nbytes)

    def make(self, nbytes: int) -> None:
        self.pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=nbytes > 0)
        self.host: NDArray[np.uint8] = self.pinned.numpy()
        self.views: dict[Staged[Any], tuple[Any, Tensor]] = {}  # and the part that is sent


class StagingRing:
    """Pinned buffers in turn.

    Args:
        depth: buffers, and so copies that may be in flight before the host waits.
        nbytes: of each at first; one that is too small is made again, which takes the host a while.
    """

    def __init__(self, depth: int = 4, nbytes: int = 0) -> None:
        self._slots = [_Slot(nbytes) for _ in range(depth)]
        self._next = 0
        self._part: Tensor | None = None  # that is sent next, where it is known

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """The next buffer, to be filled and then sent; waits while its last copy runs."""
        slot, self._part = self._slots[self._next], None
        if slot.copied is not None:
            slot.copied.synchronize()
        if len(slot.host) < nbytes:
            slot.make(max(nbytes, 2 * len(slot.host), 1 << 16))
        return slot.host

    def take_views(self, staged: Staged[Views]) -> Views:
        """Variant of :meth:`take` by views that are made once for each buffer."""
        host, slot = self.take(staged.nbytes), self._slots[self._next]
        if staged not in slot.views:
            slot.views[staged] = staged.in_numpy(host), slot.pinned[: staged.nbytes]
        views: Views
        views, self._part = slot.views[staged]
        return views

    def send(self, target: Tensor) -> None:
        """Copy the start of the buffer taken last to ``target``, uint8 ``[n]`` on the GPU.

        The copy runs on the current stream; the host does not wait for it.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        part = slot.pinned[: target.shape[0]] if self._part is None else self._part
        target.copy_(part, non_blocking=True)
        if slot.copied is None:
            slot.copied = torch.cuda.Event()
        slot.copied.record()

    def upload(self, arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
        """Copies of some arrays on the GPU, made by the current stream; the host does not wait."""
        layout = Layout.of(arrays)
        host = self.take(layout.nbytes)
        for name, view in layout.in_numpy(host).items():
            view[...] = arrays[name]
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self.send(buffer)
        return layout.in_torch(buffer)


Upload = Callable[[Mapping[str, NDArray[Any]]], dict[str, Tensor]]
"""Brings arrays to a device; neither side waits."""


def uploads_to(device: torch.device, depth: int, nbytes: int) -> Upload:
    """Function that brings arrays to a device.

    Args:
        device: to a GPU they go through a :class:`StagingRing`; on the CPU nothing is copied.
        depth: copies that may be in flight before the host waits.
        nbytes: of an ordinary one.
    """
    if device.type == "cuda":
        return partial(StagingRing(depth, nbytes).upload, device=device)
    return lambda arrays: {name: torch.from_numpy(a).to(device) for name, a in arrays.items()}
