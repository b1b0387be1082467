"""The FP8 lightning indexer: scores of prefill and decode, and selection."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dsa_compile.kernels.cuda import index_candidates, index_logits, index_topk
from dsa_compile.kernels.peers import deep_gemm, vllm_topk
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.measure.case import Call, Case, Plan

HEADS, DIM, BLOCK_SIZE, TOPK = 64, 128, 64, 2048
TOLERANCE = 2e-3  # of the largest score: the tensor cores keep fewer than fp32's bits
L2_BYTES = 60 << 20
_SAMPLES = 8  # rows that are checked


def plans() -> Iterator[Plan]:
    """The shapes of DeepGEMM's published figures, and longer ones."""
    for rows, keys in ((2048, 8192), (8192, 8192), (2048, 65536), (4096, 131072)):
        shape = f"{rows:,} × {keys:,}"
        yield Plan("index logits prefill", shape, partial(prefill, rows, keys))
    for requests, context, queries in (
        (1, 8192, 1),
        (1, 65536, 1),
        (1, 131072, 1),
        (32, 8192, 1),
        (64, 8192, 1),
        (64, 65536, 1),
        (128, 8192, 1),
        (64, 8192, 2),
        (64, 8192, 4),
    ):
        shape = f"{requests} × {context:,}" + (f", {queries} queries" if queries > 1 else "")
        yield Plan(
            "index logits decode",
            shape,
            partial(decode, requests, context, queries),
        )
    for rows, keys in (
        (1, 8192),
        (1, 131072),
        (2048, 8192),
        (2048, 32768),
        (2048, 65536),
        (2048, 131072),
    ):
        yield Plan("index top-k", f"{rows:,} × {keys:,}", partial(selection, rows, keys))


@dataclass(frozen=True)
class Pages:
    """A cache whose pages lie in random order, all requests equally long."""

    cache: Tensor
    keys: Tensor
    scales: Tensor
    tables: Tensor

    def listed(self, request: int) -> tuple[Tensor, Tensor]:
        """Keys ``[N, 128]`` and scales ``[N]`` of a request, in order of position."""
        order = self.tables[request].long()
        return self.keys[order].flatten(0, 1), self.scales[order].flatten()


def random_e4m3(*shape: int) -> Tensor:
    """Normal values on the current GPU."""
    return torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)


def random_pages(requests: int, context: int) -> Pages:
    """Pages for ``requests`` contexts, a multiple of the block size long."""
    count = requests * context // BLOCK_SIZE
    keys = random_e4m3(count, BLOCK_SIZE, DIM)
    scales = torch.rand((count, BLOCK_SIZE), device="cuda") + 0.5
    parts = [keys.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)]
    cache = torch.cat(parts, 1).view(count, BLOCK_SIZE, DIM + 4)
    tables = torch.randperm(count, device="cuda").int().view(requests, -1)
    return Pages(cache, keys, scales, tables)


def int32(values: Sequence[int]) -> Tensor:
    """Tensor int32 ``[n]`` of the values, on the current GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def prefill(rows: int, keys: int, heads: int = HEADS) -> Case:
    """The last ``rows`` positions of a context, with keys in pages; the peer's in one array."""
    pages = random_pages(1, keys)
    k, k_scale = pages.listed(0)
    q, weights = random_e4m3(rows, heads, DIM), torch.randn((rows, heads), device="cuda")
    starts = int32([0] * rows)
    ends = int32(range(keys - rows + 1, keys + 1))
    out = torch.empty((rows, keys), device="cuda")
    paged = (pages.cache, pages.tables, int32([0, rows]), int32([keys]))
    candidates: dict[str, Sequence[Call]] = {
        "cuda": [lambda: index_logits.paged_index_logits(q, weights, *paged, out=out)[0]],
    }
    if not (missing := _missing()):
        candidates["deep_gemm"] = [
            lambda: deep_gemm.ragged_index_logits(q, weights, k, k_scale, starts, ends)
        ]

    def check(result: Tensor) -> str | None:
        for row in torch.randint(0, rows, (_SAMPLES,)).tolist():
            seen = keys - rows + 1 + row
            expected = _scores(q[row], weights[row], k[:seen], k_scale[:seen])
            if problem := _differs(result[row, :seen], expected):
                return problem
        return None

    pairs = rows * (keys - rows) + rows * (rows + 1) / 2
    return Case(
        candidates=candidates,
        check=check,
        bytes=q.numel() + 4.0 * weights.numel() + keys * (DIM + 4.0) + 4.0 * pairs,
        flops=2.0 * pairs * heads * DIM,
        math="fp8",
        unavailable=missing,
    )


def decode(requests: int, context: int, queries: int, heads: int = HEADS) -> Case:
    """The last ``queries`` positions of each of ``requests`` contexts."""
    size = requests * context * (DIM + 4)
    copies = 1 if size < L2_BYTES / 2 else max(2, min(4, 4 * L2_BYTES // size))
    sets = [random_pages(requests, context) for _ in range(copies)]
    rows = requests * queries
    q, weights = random_e4m3(rows, heads, DIM), torch.randn((rows, heads), device="cuda")
    row_starts, lengths = int32(range(0, rows + 1, queries)), int32([context] * requests)
    out = torch.empty((rows, context), device="cuda")

    def ours(pages: Pages) -> Call:
        return lambda: index_logits.paged_index_logits(
            q, weights, pages.cache, pages.tables, row_starts, lengths, out=out
        )[0]

    candidates: dict[str, Sequence[Call]] = {"cuda": [ours(pages) for pages in sets]}
    missing = _missing()
    if queries > 2:
        missing = {"deep_gemm": "takes one or two queries a request on Hopper"}
    if not missing:
        seen = lengths[:, None] - int32(range(queries - 1, -1, -1))
        plan = deep_gemm.plan_paged_index_logits(seen)

        def theirs(pages: Pages) -> Call:
            return lambda: deep_gemm.paged_index_logits(
                q, weights, pages.cache, pages.tables, seen, plan
            )

        candidates["deep_gemm"] = [theirs(pages) for pages in sets]

    def check(result: Tensor) -> str | None:
        for row in torch.randint(0, rows, (_SAMPLES,)).tolist():
            k, k_scale = sets[0].listed(row // queries)
            length = context - queries + 1 + row % queries
            expected = _scores(q[row], weights[row], k[:length], k_scale[:length])
            if problem := _differs(result[row, :length], expected):
                return problem
        return None

    return Case(
        candidates=candidates,
        check=check,
        bytes=q.numel() + 4.0 * weights.numel() + size + 4.0 * rows * context,
        flops=2.0 * rows * context * heads * DIM,
        math="fp8",
        unavailable=missing,
    )


def selection(rows: int, keys: int) -> Case:
    """Scores of the last ``rows`` positions of a context, then the best 2,048 of each.

    The pages lie in order, so that the physical rows, which ours returns, are also the positions,
    which the peers return. ``cuda/written``: with all scores in memory, where ``cuda`` is without.
    """
    pages = random_pages(1, keys)
    pages.tables.copy_(torch.arange(pages.tables.shape[1]))
    k, k_scale = pages.listed(0)
    q, weights = random_e4m3(rows, HEADS, DIM), torch.randn((rows, HEADS), device="cuda")
    paged = (pages.cache, pages.tables, int32([0, rows]), int32([keys]))
    ends = int32(range(keys - rows + 1, keys + 1))
    zeros, out = torch.zeros_like(ends), ends.new_empty((rows, TOPK))
    candidates: dict[str, Sequence[Call]] = {
        "cuda": [lambda: index_topk.paged_index_topk_fp8(q, weights, *paged, TOPK)]
    }
    x = index_candidates.Paged(q, weights, *paged)
    if index_topk.prefers_lists(x):
        candidates["cuda/written"] = [lambda: index_topk.score_topk(x, TOPK)]
    missing = {f"{name} + vllm": why for name, why in _missing().items()}
    try:
        vllm_topk.load()
    except ModuleNotFoundError as error:
        missing = {"deep_gemm + vllm": str(error)}
    if not missing and rows == 1:
        plan = deep_gemm.plan_paged_index_logits(ends[:, None])
        workspace = torch.zeros(vllm_topk.WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

        def peers_decode() -> Tensor:
            scores = deep_gemm.paged_index_logits(q, weights, *paged[:2], ends[:, None], plan)
            return vllm_topk.cooperative(scores, ends, out, workspace)

        candidates["deep_gemm + vllm"] = [peers_decode]
    elif not missing:

        def peers_prefill() -> Tensor:
            scores = deep_gemm.ragged_index_logits(q, weights, k, k_scale, zeros, ends)
            return vllm_topk.per_row(scores, zeros, ends, out)

        candidates["deep_gemm + vllm"] = [peers_prefill]

    def check(result: Tensor) -> str | None:
        for row in torch.randint(0, rows, (_SAMPLES,)).tolist():
            seen = keys - rows + 1 + row
            scores = _scores(q[row], weights[row], k[:seen], k_scale[:seen])
            chosen = result[row].long().unique()
            if chosen.numel() != TOPK or int(chosen[0]) < 0 or int(chosen[-1]) >= seen:
                return "not 2,048 different keys that the row sees"
            cut = scores.topk(TOPK).values[-1] - TOLERANCE * scores.abs().max()
            if bool((scores[chosen] < cut).any()):
                return "not the best keys"
        return None

    pairs = rows * (keys - rows) + rows * (rows + 1) / 2
    return Case(
        candidates=candidates,
        check=check,
        bytes=q.numel() + 4.0 * weights.numel() + keys * (DIM + 4.0) + 4.0 * rows * TOPK,
        flops=2.0 * pairs * HEADS * DIM,
        math="fp8",
        unavailable=missing,
    )


def _missing() -> Mapping[str, str]:
    problem = PROVIDERS["deep_gemm"].missing()
    return {"deep_gemm": problem} if problem else {}


def _scores(q: Tensor, weights: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    dots = (q.float() @ keys.float().T).relu()
    return weights @ dots * scales


def _differs(got: Tensor, expected: Tensor) -> str | None:
    if got.isnan().any():
        return "scores are NaN"
    error = float((got - expected).abs().max() / expected.abs().max())
    return f"scores differ by {error:.1e} of the largest" if error > TOLERANCE else None
