"""Rows of a padded step with drafts, derived on the GPU in three launches.

A padded step has Y requests of W rows each: row ``y * W + j`` is the ``j``-th of request ``y`` from
its last token on. Tensors are contiguous and on one device; records of sampling options are those
of :data:`~dsa_compile.kernels.cuda.sample_tokens.OPTIONS`, as five words of 64 bits.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.launch import CudaKernel

_THREADS = 128
_APART = 256  # bytes; kernels may be compiled for pointers that are multiples of 16
_WORDS = 5


@functools.cache
def _kernel(name: str, threads: int) -> CudaKernel:
    return CudaKernel("draft_rows.cu", name, {"THREADS": threads})


class Known(NamedTuple):
    """Values of a step known before it is launched, and those that the step before it has left.

    Attributes:
        ids: int64 ``[Y * W]``, -1 for a token that is not known.
        positions: int64 ``[Y * W]``, too high where the request's first token is not known.
        slots: int64 ``[Y * W]``, negative for rows of nobody.
        rows: int64 ``[Y]``, the requests' entries of the last three tensors.
        max_new: int64 ``[Y]``, rows of each request, at most W.
        options: int64 ``[Y, 5]``, records for the first row of each.
        tables: int32 ``[Y, C]``, block tables.
        last: int64 ``[R]``, the token that each request's step before ended with.
        ends: int64 ``[R]``, its position.
        first: int64 ``[R]``, the draft behind it.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    max_new: Tensor
    options: Tensor
    tables: Tensor
    last: Tensor
    ends: Tensor
    first: Tensor


class Rows(NamedTuple):
    """Rows of one call of a plan, each in the form of a request of one token.

    Attributes:
        positions: int64 ``[N]``.
        slots: int64 ``[N]``, -1 for rows of nobody.
        options: int64 ``[N, 5]``, records for their tokens.
        lengths: int32 ``[N]``, of their contexts; 0 for rows of nobody.
        tables: int32 ``[N, C]``, block tables; -1 for rows of nobody.
    """

    positions: Tensor
    slots: Tensor
    options: Tensor
    lengths: Tensor
    tables: Tensor


class Started(NamedTuple):
    """A step where its requests really are.

    Attributes:
        ids: int64 ``[Y * W]``, -1 for drafts that are not known.
        step: its rows, N = Y * W; their records name no row of a token.
        start: int64 ``[Y]``, the position of each request's last token.
        last: int64 ``[Y]``, that token.
        drafts: int64 ``[W - 1, Y]``; the first drafts are written.
        deeper: of depths 2 to W - 1, N = Y; records name the request's place in ``drafts``.
    """

    ids: Tensor
    step: Rows
    start: Tensor
    last: Tensor
    drafts: Tensor
    deeper: tuple[Rows, ...]


class Settled(NamedTuple):
    """Values that follow from the tokens of a step.

    Attributes:
        outcome: int64 ``[Y, 1 + W]``, how many tokens count of each request, and its tokens.
        ends: int64 ``[Y]``, the place of the last one that counts among the step's rows.
        following: int64 ``[Y * W]``, the token behind each row.
        options: int64 ``[Y, 5]``, records for the drafts behind, which name the requests' rows.
    """

    outcome: Tensor
    ends: Tensor
    following: Tensor
    options: Tensor


def start_rows(known: Known, block_size: int) -> Started:
    """Take off what the step before did not yield, and lay out the rows of all drafts.

    Args:
        known: of the step.
        block_size: rows of a cache page.
    """
    (requests, columns), tokens = known.tables.shape, len(known.ids)
    width = tokens // requests
    depths = max(width - 2, 0)
    ids = torch.empty_like(known.ids)
    start, last = torch.empty_like(known.rows), torch.empty_like(known.rows)
    step = _rows(1, tokens, columns, known.ids)
    deeper = _rows(depths, requests, columns, known.ids)
    drafts = parts_apart(width - 1, (requests,), known.ids)
    _kernel("start_rows", _THREADS)(
        (tokens + depths * requests, 1, 1),
        _THREADS,
        *known[:7],
        requests,
        width,
        columns,
        block_size,
        *known[7:],
        ids,
        *step,
        start,
        last,
        drafts,
        *deeper,
    )
    each = tuple(Rows(*(part[depth] for part in deeper)) for depth in range(depths))
    return Started(ids, Rows(*(part[0] for part in step)), start, last, drafts, each)


def place_drafts(ids: Tensor, last: Tensor, drafts: Tensor) -> Tensor:
    """Put drafts where tokens are not known.

    Args:
        ids: int64 ``[Y * W]``.
        last: int64 ``[Y]``, of each request.
        drafts: int64 ``[Y, W - 1]``, of any strides.

    Returns:
        int64 ``[Y * W]``.
    """
    out = torch.empty_like(ids)
    tokens, width = len(ids), len(ids) // len(last)
    _kernel("place_drafts", _THREADS)(
        _grid(tokens), _THREADS, ids, last, drafts, *drafts.stride(), tokens, width, out
    )
    return out


def settle_rows(
    sampled: Tensor,
    drafts: Tensor,
    per_thousand: int | None,
    started: Started,
    known: Known,
    following: Tensor,
) -> Settled:
    """Count the tokens that hold, and remember in ``known.last`` and ``known.ends`` what they are.

    Args:
        sampled: int64 ``[Y, W]``, a token of every row, -1 of one that failed.
        drafts: int64 ``[Y, W - 1]``, of any strides.
        per_thousand: a thousand times the tokens to keep on average; None for those up to the first
            that is not its draft.
        started: from :func:`start_rows`.
        known: of the step.
        following: int64 ``[Y * W]``, the token behind each row as far as it is known, or -1.
    """
    requests, width = sampled.shape
    outcome = sampled.new_empty(requests, 1 + width)
    ends, options = torch.empty_like(known.rows), torch.empty_like(known.options)
    behind = torch.empty_like(following)
    _kernel("settle_rows", _THREADS)(
        _grid(requests * width),
        _THREADS,
        sampled,
        drafts,
        *drafts.stride(),
        per_thousand or 0,
        known.max_new,
        started.step.options,
        known.rows,
        started.start,
        following,
        requests * width,
        width,
        known.last,
        known.ends,
        outcome,
        ends,
        behind,
        options,
    )
    return Settled(outcome, ends, behind, options)


def _grid(threads: int) -> tuple[int, int, int]:
    return -(-threads // _THREADS), 1, 1


def _rows(parts: int, rows: int, columns: int, like: Tensor) -> Rows:
    """Memory for some parts of so many rows, each tensor with the parts in front."""
    return Rows(
        parts_apart(parts, (rows,), like),
        parts_apart(parts, (rows,), like),
        parts_apart(parts, (rows, _WORDS), like),
        parts_apart(parts, (rows,), like, torch.int32),
        parts_apart(parts, (rows, columns), like, torch.int32),
    )


def parts_apart(
    count: int, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Memory ``[count, *shape]`` in which each part begins at a multiple of 256 bytes."""
    size = math.prod(shape)
    each = _APART // dtype.itemsize
    made = torch.empty(count, -(-size // each) * each, dtype=dtype, device=like.device)
    return made[:, :size].view(count, *shape)


def launch_each() -> None:
    """Launch every kernel, on tensors without memory."""
    words = torch.empty(2, dtype=torch.int64, device="meta")
    options = words.new_empty(1, _WORDS)
    tables = torch.empty(1, 1, dtype=torch.int32, device="meta")
    known = Known(words, words, words, words[:1], words[:1], options, tables, *[words] * 3)
    started = start_rows(known, 1)
    place_drafts(words, words[:1], started.drafts.T)
    settle_rows(words.view(1, 2), started.drafts.T, None, started, known, words)
