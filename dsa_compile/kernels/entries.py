"""Entries of the kernel table, by who computes."""

from dsa_compile.kernels.facts import Condition
from dsa_compile.kernels.implementation import GPUS, HOPPER, Implementation

_TRITON = "dsa_compile.kernels.triton"
_CUDA = "dsa_compile.kernels.cuda"
_PEERS = "dsa_compile.kernels.peers"


def triton_kernel(
    op: str, module: str, *conditions: Condition, note: str = "", mixed: bool = False
) -> Implementation:
    """An op by Triton, from our module of that name, on any GPU.

    ``mixed`` is as in :class:`Implementation`.
    """
    function = f"{_TRITON}.{module}:{op}"
    return Implementation(op, "triton", function, GPUS, conditions, note=note, mixed=mixed)


def cuda_kernel(
    op: str,
    module: str,
    *conditions: Condition,
    targets: tuple[str, ...] = GPUS,
    max_tokens: int | None = None,
    note: str = "",
) -> Implementation:
    """An op by CUDA C++, from our module of that name, up to ``max_tokens`` tokens of a step."""
    function = f"{_CUDA}.{module}:{op}"
    return Implementation(op, "cuda", function, targets, conditions, max_tokens, note)


def peer_kernel(
    op: str,
    provider: str,
    *conditions: Condition,
    module: str = "",
    max_tokens: int | None = None,
    note: str = "",
) -> Implementation:
    """An op by another project's kernels, on Hopper, through our module of the provider's name."""
    function = f"{_PEERS}.{module or provider}:{op}"
    return Implementation(op, provider, function, (HOPPER,), conditions, max_tokens, note)


def torch_function(
    op: str, module: str, note: str = "cuBLAS", *, traced: bool = False
) -> Implementation:
    """An op by torch's own kernels, called from our module of that name."""
    function = f"dsa_compile.kernels.{module}:{op}"
    return Implementation(op, "torch", function, GPUS, note=note, traced=traced)
