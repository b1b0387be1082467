"""Sampling on the device: one token for each row of logits, in one launch that waits for nothing.

Weights are integers and the order of tokens is that of their logits, then ids, so a row's token is
a function of its logits and options alone: not of the rows beside it, nor of the order in which
threads run.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64
from dsa_compile.kernels.cuda.operands import C_TYPES
from dsa_compile.ops.library import bad_input

MOST_TOKENS = 1 << 18
"""The largest vocabulary: the kernel's sums and the ids in its keys hold no more."""

OPTIONS = np.dtype(
    [
        ("row", np.int32),
        ("top_k", np.int32),
        ("temperature", np.float32),
        ("floor", np.float32),
        ("top_p", np.uint64),
        ("seed", np.uint64),
        ("step", np.uint64),
    ],
    align=True,
)
"""One row's options.

``row`` is its place in ``last_tokens``, or negative to write nothing there; ``top_k`` is V or more
to keep all; ``temperature`` 0 takes the likeliest; ``floor`` is the logarithm of min-p; ``top_p``
counts units of 2**-64, 0 keeps all;
``seed`` and ``step`` choose the uniform number (SplitMix64).
"""

_THREADS = 1024


@functools.cache
def _kernel(dtype: torch.dtype, threads: int) -> CudaKernel:
    defines: dict[str, int | str] = {"THREADS": threads, "LOGITS": C_TYPES[dtype]}
    return CudaKernel("sample_tokens.cu", "sample_tokens", defines)


def sample_tokens(
    logits: Tensor, options: Tensor, last_tokens: Tensor, tokens: Tensor, threads: int = _THREADS
) -> None:
    """Choose a token for each row, as ``runtime/sampling/sampler.py`` does.

    Each weight is rounded down to 2**-44 of the largest, so a token below that is never drawn.

    Args:
        logits: fp32 or bf16 ``[N, V]``, dense along V; -inf marks an impossible token.
        options: uint8, at least N entries of :data:`OPTIONS`; on the device, or in pinned memory.
        last_tokens: int64 ``[R]``; entry ``row``, unless negative,
            takes the row's token, or 0 if it has none.
        tokens: int64, at least ``[N]``, on the device or in pinned memory; takes the tokens, -1 for
            a row that holds NaN or +inf, or nothing finite.
        threads: of a row, a power of two.

    Raises:
        ValueError: a type or a layout that the kernel does not take, or V above 2**18.
    """
    if logits.dtype not in C_TYPES or logits.dim() != 2 or logits.stride(1) != 1:
        raise bad_input("sample_tokens", f"dense fp32 or bf16 logits, not {logits.dtype}")
    rows, vocab = logits.shape
    if vocab > MOST_TOKENS:
        raise bad_input("sample_tokens", f"at most {MOST_TOKENS} tokens, not {vocab}")
    assert options.numel() >= rows * OPTIONS.itemsize, (options.shape, rows)
    assert tokens.numel() >= rows, (tokens.shape, rows)
    _kernel(logits.dtype, threads)(
        (rows, 1, 1),
        threads,
        logits,
        Int64(logits.stride(0)),
        vocab,
        options,
        last_tokens,
        tokens,
    )
