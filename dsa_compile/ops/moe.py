"""Mixture of experts: the router's choice and the chosen experts' work."""

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from dsa_compile.ops.facts import CostFacts, Family, Form, OpFacts, Sizes, products
from dsa_compile.ops.library import define
from dsa_compile.ops.mlp import swiglu_packed

# torch's grouped GEMM refuses operands whose rows do not start on this many bytes.
_GROUPED_ALIGNMENT = 16


def router(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n_group: int,
    topk_group: int,
    top_k: int,
    normalize: bool,
    scale: float,
    shared_experts: int = 0,
    slot_mapping: Tensor | None = None,
    zero_dropped: bool = False,
    softmax: bool = False,
) -> tuple[Tensor, Tensor]:
    """Choose experts: sigmoid scores, group-limited top-k (``DeepseekV32TopkRouter``).

    Everything is fp32. The bias takes part in choosing only; the weights are the unbiased scores.

    Args:
        x: ``[N, H]``.
        weight: ``[E, H]``.
        bias: fp32 ``[E]``, ``e_score_correction_bias``; None for none.
        n_group: number of equal groups of experts.
        topk_group: groups kept per token, by the sum of their two best scores.
        top_k: experts per token.
        normalize: divide the chosen weights by their sum.
        scale: last factor on the weights.
        shared_experts: S experts that are numbered from E on and taken by every token, weight 1.
        slot_mapping: int64 ``[N]`` or None; a token with -1 writes no cache row, is padding, and
            takes no expert: its indices are all -1.
        zero_dropped: experts of groups that are not kept score 0 and not minus infinity, so that
            they come before experts whose bias makes them negative (``AXK2TopkRouter``).
        softmax: scores are a softmax over all experts (``MistralLarge4TextTopkRouter``).

    Returns:
        weights fp32 ``[N, top_k + S]`` and expert indices int64 ``[N, top_k + S]``; those chosen
        come first, in no set order, and the shared ones last.
    """
    logits = F.linear(x.float(), weight.float())
    scores = logits.softmax(-1) if softmax else logits.sigmoid_()
    choice = scores if bias is None else scores + bias
    if topk_group < n_group:
        grouped = choice.unflatten(1, (n_group, -1))
        group_scores = grouped.topk(2, sorted=False).values.sum(-1)
        kept = group_scores.topk(topk_group, sorted=False).indices
        dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        score = 0.0 if zero_dropped else float("-inf")
        choice = grouped.masked_fill(dropped.unsqueeze(-1), score).view(choice.shape)
    indices = choice.topk(top_k, sorted=False).indices
    weights = scores.gather(1, indices)
    if normalize:
        weights.div_(weights.sum(-1, keepdim=True).add_(1e-20))
    weights.mul_(scale)
    if shared_experts:
        every = torch.arange(shared_experts, device=x.device).add_(weight.shape[0])
        indices = torch.cat([indices, every.expand(x.shape[0], -1)], 1)
        weights = F.pad(weights, (0, shared_experts), value=1.0)
    if slot_mapping is not None:
        indices = indices.masked_fill((slot_mapping < 0).unsqueeze(1), -1)
    return weights, indices


def experts(x: Tensor, weights: Tensor, indices: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Weighted sum of the chosen experts' gated MLPs.

    Tokens are sorted by expert so that each expert is one GEMM over its tokens; of the ways tried
    on CPU (this, a loop over the experts hit, ``bmm`` over gathered weights) it is the fastest from
    8 tokens up and reads only the experts that were hit. Routing weights multiply in fp32 after the
    down projection, the sum over experts is fp32, and one rounding to ``x.dtype`` ends it.

    Args:
        x: ``[N, H]``.
        weights: fp32 ``[N, k]``.
        indices: int64 ``[N, k]``, in ``[0, E)``; -1 for an expert that another rank has, which
            weighs nothing here.
        gate_up: ``[E, 2I, H]``, gate rows first.
        down: ``[E, H, I]``.

    Returns:
        ``[N, H]`` in ``x.dtype``.
    """
    tokens, top_k = indices.shape
    weights, indices = weights.masked_fill(indices < 0, 0.0), indices.clamp(min=0)
    ordered, order = indices.reshape(-1).sort()
    every = torch.arange(gate_up.shape[0], device=x.device)
    ends = torch.searchsorted(ordered, every, right=True, out_int32=True)
    hidden = _grouped_linear(x.index_select(0, order // top_k), gate_up, ends)
    outputs = _grouped_linear(swiglu_packed(hidden), down, ends)
    outputs = torch.empty_like(outputs).index_copy_(0, order, outputs)
    weighted = outputs.view(tokens, top_k, x.shape[1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(x.dtype)


def place_experts(indices: Tensor, places: Tensor) -> Tensor:
    """Numbers of experts among all to numbers among those of this rank.

    Args:
        indices: int64 ``[N, k]``, in ``[0, E)``, or -1 for none.
        places: int64 ``[E]``, each expert's number on this rank, or -1 where another has it.

    Returns:
        int64 ``[N, k]``, -1 for experts of other ranks.
    """
    return places[indices.clamp(min=0)].masked_fill(indices < 0, -1)


def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows ``ends[e-1]:ends[e]`` of x ``[S, in]`` times expert e of weight ``[E, out, in]``."""
    if weight.shape[2] * weight.element_size() % _GROUPED_ALIGNMENT == 0:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    out = x.new_empty((x.shape[0], weight.shape[1]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].t(), out=out[start:end])
            start = end
    return out


def experts_cost(*weights: str) -> CostFacts:
    """Each picked expert is read once, each pick as likely as another; ``weights`` are [E, …]."""

    def hit(sizes: Sizes) -> float:
        return 1.0 - (1.0 - 1.0 / sizes.shape("gate_up")[0]) ** math.prod(sizes.shape("indices"))

    def flops(sizes: Sizes) -> float:
        of_all = products("gate_up", "down")(sizes)
        return of_all * sizes.shape("indices")[1] / sizes.shape("gate_up")[0]

    return CostFacts(launches=3, fills=True, flops=flops, reads=dict.fromkeys(weights, hit))


ROUTER = define(
    "router(Tensor x, Tensor weight, Tensor? bias, int n_group, int topk_group, int top_k,"
    " bool normalize, float scale, int shared_experts=0, Tensor? slot_mapping=None,"
    " bool zero_dropped=False, bool softmax=False) -> (Tensor weights, Tensor indices)",
    router,
    "(x: f[N, H], weight: f[E, H], bias: f32[E], slot_mapping: i64[N])"
    " -> (f32[N, top_k + shared_experts], i64[N, top_k + shared_experts])",
    OpFacts(
        Family.ROUTER,
        Form.ANY,
        skips="slot_mapping",
        cost=CostFacts(chain_us=2.0, flops=products("weight")),
        torch_kernels=True,
    ),
    where=(
        "E % n_group == 0",
        "0 < topk_group <= n_group",
        "0 < top_k <= topk_group * (E // n_group)",
    ),
)
EXPERTS = define(
    "experts(Tensor x, Tensor weights, Tensor indices, Tensor gate_up, Tensor down) -> Tensor",
    experts,
    "(x: f[N, H], weights: f32[N, k], indices: i64[N, k], gate_up: x[E, 2 * I, H],"
    " down: x[E, H, I]) -> x[N, H]",
    OpFacts(Family.EXPERTS, Form.ANY, sums=("E", "I"), cost=experts_cost("gate_up", "down")),
)
PLACE_EXPERTS = define(
    "place_experts(Tensor indices, Tensor places) -> Tensor",
    place_experts,
    "(indices: i64[N, k], places: i64[E]) -> i64[N, k]",
    OpFacts(Family.POINTWISE, Form.ANY, skips="indices", torch_kernels=True),
)
