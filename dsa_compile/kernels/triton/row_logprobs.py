"""Log-probabilities of some rows of logits: the chosen token's, its rank, and the likeliest tokens.

Two launches: a block of a row gives its maximum, its sum, its share of the rank and its likeliest
tokens; one program a row joins them. Tokens are ordered by integers made of their logit and id, so
equals rank the lowest id first and the order does not depend on how a row is cut.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsa_compile.kernels.sampling_layout import MOST_TOP, ROW_LOGPROBS, words

_BLOCK = 4096
_FULL = tl.constexpr(0xFFFFFFFF)
_LOW = tl.constexpr(-(2**63))


@triton.jit
def _key(x: tl.tensor, token: tl.tensor) -> tl.tensor:
    """int64 that orders as the logits do, equal ones by lowest id."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 as +0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (token.to(tl.int64) ^ _FULL)


@triton.jit(do_not_specialize=["blocks", "top"])
def describe_blocks_kernel(
    logits: tl.tensor,
    stride: int,
    vocab: int,
    places: tl.tensor,
    owners: tl.tensor,
    tokens: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    blocks: int,
    top: int,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """``BLOCK`` tokens of a row: ``sums`` takes maximum, sum of exponentials, larger logits."""
    row, block = tl.program_id(0), tl.program_id(1)
    start = logits + tl.load(places + row).to(tl.int64) * stride
    chosen = tl.load(start + tl.load(tokens + tl.load(owners + row))).to(tl.float32)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(start + token, token < vocab, -float("inf")).to(tl.float32)
    most = tl.max(x, 0)
    base = tl.where(most > -float("inf"), most, 0.0)
    at = row * blocks + block
    tl.store(sums + 3 * at, most)
    tl.store(sums + 3 * at + 1, tl.sum(tl.exp(x - base), 0))
    tl.store(sums + 3 * at + 2, tl.sum((x > chosen).to(tl.float32), 0))  # exact: at most BLOCK
    key = tl.where(token < vocab, _key(x, token), _LOW)
    for place in range(top):
        best = tl.max(key, 0)
        tl.store(keys + at * TOP + place, best)
        key = tl.where(key == best, _LOW, key)


@triton.jit(do_not_specialize=["blocks", "top"])
def join_blocks_kernel(
    logits: tl.tensor,
    stride: int,
    places: tl.tensor,
    owners: tl.tensor,
    tokens: tl.tensor,
    sums: tl.tensor,
    keys: tl.tensor,
    out: tl.tensor,
    blocks: int,
    top: int,
    BLOCKS: tl.constexpr,
    TOP: tl.constexpr,
) -> None:
    """One row: ``out`` takes its record."""
    row = tl.program_id(0)
    start = logits + tl.load(places + row).to(tl.int64) * stride
    chosen = tl.load(start + tl.load(tokens + tl.load(owners + row))).to(tl.float32)
    block = tl.arange(0, BLOCKS)
    part, there = sums + 3 * (row * blocks + block), block < blocks
    most = tl.load(part, there, -float("inf"))
    total = tl.load(part + 1, there, 0.0)
    rank = 1 + tl.sum(tl.load(part + 2, there, 0.0).to(tl.int32), 0)
    largest = tl.max(most, 0)
    norm = largest + tl.log(tl.sum(total * tl.exp(most - largest), 0))
    record = out + row * (2 + 2 * TOP)
    tl.store(record, (chosen - norm).to(tl.int32, bitcast=True))
    tl.store(record + 1, rank)
    entry = tl.arange(0, BLOCKS * TOP)
    wanted = (entry < blocks * TOP) & (entry % TOP < top)
    key = tl.load(keys + row * blocks * TOP + entry, wanted, _LOW)
    for place in range(top):
        best = tl.max(key, 0)
        key = tl.where(key == best, _LOW, key)
        ordered = (best >> 32).to(tl.int32)
        value = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(record + 2 + place, ((best & _FULL) ^ _FULL).to(tl.int32))
        tl.store(record + 2 + TOP + place, (value - norm).to(tl.int32, bitcast=True))


def row_logprobs(
    logits: Tensor, places: Tensor, owners: Tensor, tokens: Tensor, top: int
) -> Tensor:
    """Describe a token of each of some rows of logits.

    Args:
        logits: fp32 or bf16 ``[N, V]``, dense along V.
        places: int32 ``[D]``, the rows.
        owners: int32 ``[D]``, where in ``tokens`` each row's token is.
        tokens: int64, each in ``[0, V)``.
        top: how many of the likeliest tokens to list, at most ``MOST_TOP``.

    Returns:
        int32 ``[D, 66]``, a record of :data:`~dsa_compile.kernels.sampling_layout.ROW_LOGPROBS` a
        row; what is not listed is undefined. Where a row has fewer than ``top`` tokens, the
        log-probabilities behind them are NaN. A row with NaN or nothing finite has no meaning.
    """
    count, vocab = places.shape[0], logits.shape[1]
    blocks = triton.cdiv(vocab, _BLOCK)
    sums = logits.new_empty((count, blocks, 3), dtype=torch.float32)
    keys = logits.new_empty((count, blocks, MOST_TOP), dtype=torch.int64)
    out = logits.new_empty((count, words(ROW_LOGPROBS)), dtype=torch.int32)
    assert 0 <= top <= MOST_TOP, top
    if count:
        described = (places, owners, tokens)
        describe_blocks_kernel[(count, blocks)](
            logits, logits.stride(0), vocab, *described, sums, keys, blocks, top,
            BLOCK=_BLOCK, TOP=MOST_TOP, num_warps=8,
        )  # fmt: skip
        join_blocks_kernel[(count,)](
            logits, logits.stride(0), *described, sums, keys, out, blocks, top,
            BLOCKS=triton.next_power_of_2(blocks), TOP=MOST_TOP, num_warps=8,
        )  # fmt: skip
    return out
