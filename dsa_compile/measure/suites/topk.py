"""Top-k of fp32 scores, as decode and prefill of the lightning indexer leave them."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dsa_compile.kernels.cuda.topk import topk
from dsa_compile.kernels.peers import flashinfer, vllm_topk
from dsa_compile.measure.case import Call, Case, Plan

K = 2048
SHAPES = (
    (1, 9295),
    (64, 9295),
    (1, 32768),
    (64, 32768),
    (1, 131072),
    (32, 131072),
    (64, 131072),
    (256, 8192),
    (2048, 8192),
    (2048, 65536),
)
PAGE = 64
_COPIES_BYTES = 100 << 20  # scores come warm from the kernel that made them, but not all of them


def plans() -> Iterator[Plan]:
    """Columns at all shapes, then physical rows, whose peers have no such form."""
    for rows, width in SHAPES:
        make = partial(_normal_case, rows, width)
        yield Plan("top-k", f"{rows:,}×{width:,}", make)
    for rows, width in ((1, 131072), (64, 9295), (2048, 8192)):
        yield Plan("top-k to pages", f"{rows:,}×{width:,}", partial(_paged_case, rows, width))


def number_of_copies(rows: int, width: int) -> int:
    """Copies of scores among which calls take turns."""
    return max(1, min(4, _COPIES_BYTES // (rows * width * 4)))


def padded(rows: int, width: int) -> Tensor:
    """fp32 ``[rows, width]``, not initialised; rows begin at 16 bytes, as one peer needs it."""
    return torch.empty(rows, -(-width // 4) * 4, device="cuda")[:, :width]


def _scores(rows: int, width: int) -> list[Tensor]:
    return [padded(rows, width).normal_() for _ in range(number_of_copies(rows, width))]


def _limit_bytes(rows: int, width: int) -> float:
    return 4.0 * rows * (width + K)


def _wrong(scores: Tensor, columns: Tensor) -> str | None:
    """Problem of columns for rows of more than K scores, or None."""
    columns = columns.long()
    if int(columns.min()) < 0 or int(columns.max()) >= scores.shape[1]:
        return "columns outside the row"
    if bool((columns.sort(1).values.diff(dim=1) == 0).any()):
        return "a column comes twice"
    best = scores.topk(K, sorted=True).values
    if not torch.equal(scores.gather(1, columns).sort(1, descending=True).values, best):
        return "not the largest scores"
    return None


def _normal_case(rows: int, width: int) -> Case:
    return case(_scores(rows, width))


def case(copies: Sequence[Tensor]) -> Case:
    """Top-k of copies of scores, each like :func:`padded`, by all kernels.

    The rows hold no NaN and are longer than :data:`K`.
    """
    rows, width = copies[0].shape
    ends = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    zeros = torch.zeros_like(ends)

    def calls(select: Callable[[Tensor], Tensor]) -> Sequence[Call]:
        return [partial(select, scores) for scores in copies]

    candidates = {
        "cuda": calls(lambda scores: topk(scores, ends, K)),
        "torch": calls(lambda scores: scores.topk(K, sorted=False).indices),
    }
    unavailable = {}
    if importlib.util.find_spec("flashinfer") is None:
        unavailable["flashinfer"] = "flashinfer is not installed"
    else:
        candidates["flashinfer"] = [  # it takes contiguous scores only
            partial(flashinfer.topk, scores.contiguous(), ends, K, offsets=zeros)
            for scores in copies
        ]
    try:
        vllm_topk.load()
    except ModuleNotFoundError as error:
        unavailable["vllm"] = str(error)
    else:
        out = torch.empty(rows, K, dtype=torch.int32, device="cuda")
        workspace = torch.zeros(vllm_topk.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        candidates |= {
            "vllm/per row": calls(lambda scores: vllm_topk.per_row(scores, zeros, ends, out)),
            "vllm/decode": calls(lambda scores: vllm_topk.per_row_decode(scores, ends, out)),
            "vllm/persistent": calls(
                lambda scores: vllm_topk.persistent(scores, ends, out, workspace)
            ),
        }
        if rows <= 32:
            candidates["vllm/cooperative"] = calls(
                lambda scores: vllm_topk.cooperative(scores, ends, out, workspace)
            )
    return Case(
        candidates, partial(_wrong, copies[0]), _limit_bytes(rows, width), unavailable=unavailable
    )


def _paged_case(rows: int, width: int) -> Case:
    copies = _scores(rows, width)
    ends = torch.full((rows,), width, dtype=torch.int32, device="cuda")
    pages = -(-width // PAGE)
    requests = 1 if rows == 2048 else rows  # a prefill is of one request
    tables = torch.randperm(requests * pages, device="cuda").view(requests, pages).int()
    of_row = torch.arange(rows, device="cuda", dtype=torch.int32) % requests
    logical = torch.empty(requests * pages, dtype=torch.long, device="cuda")
    logical[tables.flatten().long()] = torch.arange(pages, device="cuda").repeat(requests)

    def check(physical: Tensor) -> str | None:
        columns = logical[physical.long() // PAGE] * PAGE + physical % PAGE
        return _wrong(copies[0], columns)

    select = partial(topk, ends=ends, k=K, block_tables=tables, requests=of_row, block_size=PAGE)
    return Case(
        {"cuda": [partial(select, scores) for scores in copies]},
        check,
        _limit_bytes(rows, width) + 4 * tables.numel(),
    )
