"""A collective's stand-in on one GPU: copies of the operand, and a kernel of a given duration."""

from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel, Int64

CHUNK = 16
_THREADS, _MOST_BLOCKS = 256, 264

REPLAY = CudaKernel("replay_collective.cu", "replay_collective", overlap=True)


def replay_collective(x: Tensor, out: Tensor, wait: Tensor) -> None:
    """Fill ``out`` with copies of ``x``, and take as long as ``wait`` says.

    Args:
        x: contiguous, of a multiple of 16 bytes.
        out: one or more parts of the shape and dtype of ``x``, contiguous.
        wait: int64 ``[1]`` on the GPU, nanoseconds from the kernel's start to its end; read when
            the kernel runs, so that a captured graph may be replayed with others.
    """
    chunks, copies = x.nbytes // CHUNK, out.nbytes // max(1, x.nbytes)
    blocks = min(max(1, -(-chunks // _THREADS)), _MOST_BLOCKS)
    REPLAY((blocks, 1, 1), _THREADS, x, out, Int64(chunks), copies, wait)
