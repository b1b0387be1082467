"""Cases of a suite, which the harness runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One op on one input, ready to run.

    Args:
        candidates: provider → calls on prepared inputs. Several calls work on different copies of
            what must come from memory and not from the L2 cache; they are taken in turn. A call can
            be captured in a CUDA graph and returns the result to check.
        check: what is wrong with a result, or None.
        bytes: the least traffic with device memory, reads plus writes.
        flops: operations of the tensor cores; a multiplication and an addition are two.
        math: the type whose rate limits ``flops``, ``"fp8"`` or ``"bf16"``.
        unavailable: provider → why it is not among the candidates.
    """

    candidates: Mapping[str, Sequence[Call]]
    check: Callable[[Any], str | None]
    bytes: float
    flops: float = 0.0
    math: str = "bf16"
    unavailable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A case by name, made when its turn comes.

    Args:
        op: what is computed, as the tables name it.
        shape: which input, such as ``"64×9,295"``.
        make: prepares the inputs on the current device. Ours are the providers ``triton``,
            ``gluon`` and ``cuda``, with an optional variant after a slash; all others are peers.
        family: which distribution of values, where a shape is measured with several.
    """

    op: str
    shape: str
    make: Callable[[], Case]
    family: str = ""

    @property
    def name(self) -> str:
        """Name of a case for ``--only``."""
        return f"{self.op} {self.shape} {self.family}".rstrip()


def is_ours(provider: str) -> bool:
    """Whether a provider's kernels are this project's own."""
    return provider.partition("/")[0] in ("triton", "gluon", "cuda")
