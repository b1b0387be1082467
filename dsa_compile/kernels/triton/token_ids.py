"""Token ids of a step whose last ones are still on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["count", "most"])
def resolve_kernel(
    ids: tl.tensor,
    rows: tl.tensor,
    sampled: tl.tensor,
    out: tl.tensor,
    count: int,
    most: int,
    BLOCK: tl.constexpr,
) -> None:
    """``BLOCK`` tokens; a row outside ``sampled`` reads nothing and gives token 0."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = tl.load(ids + token, token < count, 0)
    row = tl.load(rows + token, token < count, -1)
    missing = (known < 0) & (row >= 0) & (row < most)
    last = tl.load(sampled + row, missing, 0)
    tl.store(out + token, tl.where(known < 0, last, known), token < count)


def resolve_token_ids(ids: Tensor, rows: Tensor, sampled: Tensor) -> Tensor:
    """Put sampled tokens where the host knew none.

    Args:
        ids: int64 ``[T]``, negative where the token is not known.
        rows: int32 ``[T]``, place of each token's request in ``sampled``.
        sampled: int64 ``[R]``, the last token of each request.

    Returns:
        int64 ``[T]``.
    """
    out = torch.empty_like(ids)
    count = ids.shape[0]
    if count:
        resolve_kernel[(triton.cdiv(count, _BLOCK),)](
            ids, rows, sampled, out, count, sampled.shape[0], BLOCK=_BLOCK, num_warps=4
        )
    return out
