"""vLLM's top-k operators, for comparison only: they come with an engine, not as a library."""

from typing import Any

from torch import Tensor

from dsa_compile.kernels.peers import vllm_files

WORKSPACE_BYTES = 1 << 20
"""Workspace that the persistent and the cooperative operator need, zeroed once."""


def load() -> Any:
    """The namespace of the operators, without importing vLLM.

    Raises:
        ModuleNotFoundError: vLLM is not installed, or has no such library.
    """
    return vllm_files.library("_C")


def per_row(scores: Tensor, starts: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """The operator of its prefill: one thread block a row.

    Args:
        scores: fp32 ``[T, W]``.
        starts: int32 ``[T]``.
        ends: int32 ``[T]``.
        out: int32 ``[T, k]``, written.
    """
    rows, k = out.shape
    load().top_k_per_row_prefill(
        scores, starts, ends, out, rows, scores.stride(0), scores.stride(1), k
    )
    return out


def per_row_decode(scores: Tensor, ends: Tensor, out: Tensor) -> Tensor:
    """Operator of vLLM's decode, which may divide a row; arguments as of :func:`per_row`."""
    rows, k = out.shape
    load().top_k_per_row_decode(scores, 1, ends, out, rows, scores.stride(0), scores.stride(1), k)
    return out


def persistent(scores: Tensor, ends: Tensor, out: Tensor, workspace: Tensor) -> Tensor:
    """Thread blocks that stay for several rows. ``workspace``: :data:`WORKSPACE_BYTES`."""
    load().persistent_topk(scores, ends, out, workspace, out.shape[1], scores.shape[1])
    return out


def cooperative(scores: Tensor, ends: Tensor, out: Tensor, workspace: Tensor) -> Tensor:
    """A cluster of thread blocks for each row; few rows, a multiple of four scores apart."""
    load().cooperative_topk(scores, ends, out, workspace, out.shape[1], scores.shape[1])
    return out
