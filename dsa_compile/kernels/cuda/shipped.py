"""Machine code that came with an artifact, found only while its owner launches kernels."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from dsa_compile.kernels.cuda.compiler import Defines, cubin_name


class ShippedKernels:
    """Cubins of one artifact, checked by whoever read them and held here.

    A kernel takes its machine code from those :meth:`in_use` when it is launched, and is compiled
    where they lack it. There are none outside such a block, and none in a thread that was started
    within one: what one engine may run decides nothing for another.

    Args:
        cubins: contents by :func:`~dsa_compile.kernels.cuda.compiler.cubin_name`.

    Attributes:
        digest: hex SHA-256 over names and contents; equal cubins have equal digests.
    """

    def __init__(self, cubins: Mapping[str, bytes]) -> None:
        self._cubins = dict(cubins)
        pairs = (f"{n} {hashlib.sha256(c).hexdigest()}" for n, c in sorted(cubins.items()))
        self.digest = hashlib.sha256("\n".join(pairs).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._cubins)

    def find(self, source: str, *, arch: str, defines: Defines | None = None) -> bytes | None:
        """Cubin that :func:`~dsa_compile.kernels.cuda.compiler.build` would return, or None."""
        if not self._cubins:
            return None
        return self._cubins.get(cubin_name(source, arch=arch, defines=defines))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Kernels launched by this thread within the block run these cubins."""
        token = _in_use.set(self)
        try:
            yield
        finally:
            _in_use.reset(token)


NO_KERNELS = ShippedKernels({})
_in_use: ContextVar[ShippedKernels] = ContextVar("shipped_kernels", default=NO_KERNELS)


def kernels_in_use() -> ShippedKernels:
    """Shipped kernels of the innermost :meth:`ShippedKernels.in_use` around the caller, or none."""
    return _in_use.get()
