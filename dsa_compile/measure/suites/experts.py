"""The routed experts of one layer in FP8, from one token to a prefill chunk, uniform routing."""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from dsa_compile.kernels.peers import vllm_experts
from dsa_compile.kernels.providers import PROVIDERS
from dsa_compile.measure.case import Call, Case, Plan
from dsa_compile.ops.experts_fp8 import experts_fp8 as reference
from dsa_compile.ops.quantize import E4M3, quantize_blocks

EXPERTS, HIDDEN, TOP_K = 256, 7168, 8
TOKENS = (1, 2, 8, 16, 64, 128, 512, 1024, 2048, 4096, 8192)
RANK_TOKENS = (1, 16, 128, 1024)
TOLERANCE = 2.5e-2
"""Relative error of all values together: 1.6e-2 where gate and up are rounded to bf16 before the
activation, for some values then quantise to the neighbouring e4m3; 4e-3 without that."""

Matrices = tuple[Tensor, Tensor, Tensor, Tensor]
Tokens = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Part of a layer's experts that is here.

    Attributes:
        experts: the first so many of :data:`EXPERTS`; choices of others are skipped.
        inner: width of each.
    """

    experts: int
    inner: int


WHOLE = Part(EXPERTS, 2048)
RANKS = {"TP 8": Part(EXPERTS, 256), "EP 8": Part(EXPERTS // 8, 2048)}
"""Parts of one rank of eight, by how the experts are divided."""


def plans() -> Iterator[Plan]:
    """Plans by tokens: the whole op, that of a rank, and a peer's two products on rows in place."""
    for tokens in TOKENS:
        yield Plan("experts_fp8", f"{tokens:,} tokens", partial(_experts, tokens, WHOLE))
    for name, part in RANKS.items():
        for tokens in RANK_TOKENS:
            if tokens < EXPERTS // part.experts:
                continue  # they may choose none of the rank's experts
            shape = f"{tokens:,} tokens, {name}"
            yield Plan("experts_fp8 of a rank", shape, partial(_experts, tokens, part))
    for tokens in (128, 8192):
        yield Plan("grouped products", f"{tokens:,} tokens", partial(_products, tokens))


@lru_cache(maxsize=1)
def _matrices(part: Part) -> Matrices:
    """One layer's weights, 11.3 GB; drawn anew they would take longer than what is measured."""

    def quantised(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        weight = torch.empty(part.experts, rows, columns, dtype=E4M3, device="cuda")
        for e in range(part.experts):
            drawn = torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda")
            weight[e] = drawn.mul_(60).clamp_(-448, 448).to(E4M3)
        scale = torch.rand(part.experts, rows // 128, columns // 128, device="cuda")
        return weight, scale.add_(0.5).mul_(3e-4)

    return *quantised(2 * part.inner, HIDDEN), *quantised(HIDDEN, part.inner)


def _tokens(count: int) -> Tokens:
    x, x_scale = quantize_blocks(torch.randn(count, HIDDEN, device="cuda"), False)
    indices = torch.rand(count, EXPERTS, device="cuda").topk(TOP_K).indices
    return x, x_scale, torch.rand(count, TOP_K, device="cuda"), indices


def _work(inputs: list[Tokens], part: Part) -> tuple[float, float]:
    """Mean least traffic and operations: the weights of the experts hit, x and the result."""
    count = inputs[0][0].shape[0]
    here = [i[3][i[3] < part.experts] for i in inputs]
    hit = sum(chosen.unique().numel() for chosen in here) / len(here)
    pairs = sum(chosen.numel() for chosen in here) / len(here)
    moved = hit * 3 * part.inner * HIDDEN + 3 * count * HIDDEN
    return moved, 6.0 * part.inner * HIDDEN * pairs


def _check(inputs: Tokens, matrices: Matrices) -> Callable[[Tensor], str | None]:
    want = reference(*inputs, *matrices).float()
    norm = want.norm()

    def check(out: Tensor) -> str | None:
        error = float((out.float() - want).norm() / norm)
        return None if error < TOLERANCE else f"relative error {error:.1e}"

    return check


def _experts(count: int, part: Part) -> Case:
    from dsa_compile.kernels.cuda.experts_fp8 import experts_fp8 as cuda
    from dsa_compile.kernels.triton.experts import experts_fp8 as triton

    matrices = _matrices(part)
    # few tokens hit few experts: other experts in every call, so that none is found in L2
    inputs = [_tokens(count) for _ in range(6 if count < 16 else 1)]

    def turns(function: Callable[..., Tensor]) -> list[Call]:
        return [partial(function, *i, *matrices) for i in inputs]

    candidates = {"cuda": turns(cuda), "triton": turns(triton)}
    unavailable = {}
    if problem := PROVIDERS["deep_gemm"].missing():
        unavailable["deep_gemm"] = problem
    else:
        peer = importlib.import_module("dsa_compile.kernels.peers.deep_gemm_experts")
        candidates["deep_gemm"] = turns(peer.experts_fp8)
    try:
        candidates |= _vllm(inputs, matrices, part)
    except (ImportError, AttributeError) as error:  # none, or of another shape than expected
        unavailable["vllm"] = str(error)
    moved, flops = _work(inputs, part)
    return Case(
        candidates,
        _check(inputs[0], matrices),
        bytes=moved,
        flops=flops,
        math="fp8",
        unavailable=unavailable,
    )


def _vllm(inputs: list[Tokens], matrices: Matrices, part: Part) -> Mapping[str, list[Call]]:
    """Triton experts of vLLM; the provider's name says whether vLLM tuned them for such a part."""
    vllm_experts.load()
    tuned = vllm_experts.tuned(part.experts, part.inner)
    places = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cuda")
    places[: part.experts] = torch.arange(part.experts, dtype=torch.int32, device="cuda")
    own = None if part.experts == EXPERTS else places
    calls: list[Call] = [
        partial(vllm_experts.experts_fp8, *i[:3], i[3].int(), *matrices, expert_map=own)
        for i in inputs
    ]
    return {f"vllm/{'tuned' if tuned else 'default'}": calls}


def _products(count: int) -> Case:
    """Products of a peer alone, without the gathering, activation and weighted sum around them."""
    matrices = _matrices(WHOLE)
    if problem := PROVIDERS["deep_gemm"].missing():
        return Case({}, lambda out: None, bytes=0.0, unavailable={"deep_gemm": problem})
    inputs = _tokens(count)
    peer = importlib.import_module("dsa_compile.kernels.peers.deep_gemm_experts")
    rows = peer.place_rows(inputs[3], EXPERTS)
    x, x_scale = peer.gather_rows(rows, inputs[0], inputs[1])
    hidden, hidden_scale = quantize_blocks(
        torch.randn(rows.capacity, WHOLE.inner, device="cuda"), False
    )
    hidden_scale = peer.aligned(hidden_scale)

    def products() -> Tensor:
        peer.product(rows, x, x_scale, *matrices[:2])
        out: Tensor = peer.product(rows, hidden, hidden_scale, *matrices[2:])
        return out

    expert = int(inputs[3][0, 0])
    row = int(rows.places[0])
    weight, scale = matrices[2][expert].float(), matrices[3][expert]
    weight *= scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = weight @ (hidden[row].float() * hidden_scale[row].repeat_interleave(128))

    def check(out: Tensor) -> str | None:
        error = float((out[row].float() - want).norm() / want.norm())
        return None if error < TOLERANCE else f"relative error {error:.1e}"

    moved, flops = _work([inputs], WHOLE)
    return Case({"deep_gemm": [products]}, check, bytes=moved, flops=flops, math="fp8")
