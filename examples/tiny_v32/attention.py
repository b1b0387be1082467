"""Multi-head latent attention with DeepSeek Sparse Attention, written for training.

It computes what ``DeepseekV32Attention`` and ``GlmMoeDsaAttention`` of transformers do, names its
parameters alike, and adds what those modules have no use for: dense attention, the indexer's loss,
and wrong ways to select.
"""

from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_v32.config import TinyConfig


class Select(Enum):
    """Selection of the visible keys that a query attends to."""

    ALL = "all"
    TOPK = "topk"  # the indexer's best
    RECENT = "recent"  # control: the last index_topk
    RANDOM = "random"  # control: index_topk drawn at random
    WRONG_ROPE = "wrong-rope"  # control: the indexer's RoPE in the other layout


class Aux(Enum):
    """Auxiliary losses to compute."""

    NONE = "none"
    INDEX = "index"
    INDEX_AND_SPREAD = "index and spread"


Selected = tuple[Tensor, Tensor]
"""Selection that an indexer hands on: scores, fp32 [B, S, S], and the keys attended to, bool."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in fp32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        out: Tensor = self.weight * wide.to(x.dtype)
        return out


def rope_tables(config: TinyConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each fp32 [length, qk_rope_head_dim / 2]."""
    width = config.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.float, device=device) / width
    angles = torch.arange(length, device=device)[:, None] / config.rope_theta**exponent
    return angles.cos(), angles.sin()


def rotate_half_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (i, i + D/2) of x [..., S, D]: the indexer's layout."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on pairs (2i, 2i + 1) of x [..., S, D], de-interleaved: the attention's layout."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)


class Indexer(nn.Module):
    """Scores every key for every query: Σ_h w_h · relu(q_h · k / √d)."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.rope_width = config.qk_rope_head_dim
        self.interleaved = config.index_rope_interleaved
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.width, bias=False)
        self.wk = nn.Linear(config.hidden_size, self.width, bias=False)
        self.k_norm = nn.LayerNorm(self.width, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)

    def forward(
        self, x: Tensor, q_latent: Tensor, rope: tuple[Tensor, Tensor], wrong_rope: bool
    ) -> Tensor:
        """fp32 [B, S, S] scores of (query, key), future keys included, from x [B, S, hidden]."""
        rotate = rotate_interleaved if self.interleaved != wrong_rope else rotate_half_split
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.width)).transpose(1, 2)
        k = self.k_norm(self.wk(x))
        q = torch.cat([rotate(q[..., : self.rope_width], *rope), q[..., self.rope_width :]], -1)
        k = torch.cat([rotate(k[..., : self.rope_width], *rope), k[..., self.rope_width :]], -1)
        scores = (q @ k.transpose(-1, -2).unsqueeze(1)).float() * self.width**-0.5
        weights = self.weights_proj(x).float() * self.heads**-0.5
        weighted: Tensor = F.relu(scores) * weights.transpose(1, 2).unsqueeze(-1)
        return weighted.sum(1)


class Attention(nn.Module):
    """One attention layer; without an indexer it attends to the keys that an earlier one chose."""

    def __init__(self, config: TinyConfig, owns_indexer: bool = True) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent, bias=False)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank)
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=False)
        self.indexer = Indexer(config) if owns_indexer else None

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        select: Select,
        aux: Aux,
        selected: Selected | None = None,
    ) -> tuple[Tensor, Tensor, Selected | None]:
        """Attend over x [B, S, hidden], where ``selected`` is what the layer before handed on.

        Returns:
            The layer's output [B, S, hidden], its two auxiliary losses (fp32 [2]; 0 where ``aux``
            does not ask), and what it hands on. The indexer's loss: KL from its softmax to the
            attention summed over heads, over the keys attended to, mean over queries; no gradient
            flows from it to the rest of the model. An indexer whose selection later layers reuse
            learns from the attention of them all. The spread: -log of the share of dense attention
            that falls on the keys attended to, mean over queries and heads; none flows from it to
            the indexer.
        """
        config, heads = self.config, self.config.num_attention_heads
        q_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).unflatten(-1, (heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], -1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, -1)).transpose(1, 2)
        k_nope, v = kv.split([config.qk_nope_head_dim, config.v_head_dim], -1)
        k_rope = rotate_interleaved(k_rope, *rope).unsqueeze(1).expand(-1, heads, -1, -1)
        q = torch.cat([q_nope, rotate_interleaved(q_rope, *rope).to(q_nope.dtype)], -1)
        k = torch.cat([k_nope, k_rope.to(k_nope.dtype)], -1)

        losses = x.new_zeros(2, dtype=torch.float)
        if select is Select.ALL and aux is Aux.NONE:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(out.transpose(1, 2).flatten(2)), losses, None
        length = x.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if self.indexer is not None:
            wrong_rope = select is Select.WRONG_ROPE
            scores = self.indexer(x.detach(), q_latent.detach(), rope, wrong_rope)
            selected = scores, _selected(scores.detach(), causal, select, config.index_topk)
        assert selected is not None, "the first layer owns an indexer"
        scores, keep = selected
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep.unsqueeze(1))
        if aux is not Aux.NONE:
            with torch.set_grad_enabled(aux is Aux.INDEX_AND_SPREAD and torch.is_grad_enabled()):
                logits = (q @ k.transpose(-1, -2)).float() * config.qk_head_dim**-0.5
                kept = logits.masked_fill(~keep.unsqueeze(1), float("-inf"))
            index = _kl(kept.detach().softmax(-1).mean(1), scores, keep)
            spread = index.new_zeros(())
            if aux is Aux.INDEX_AND_SPREAD:
                visible = logits.masked_fill(~causal, float("-inf"))
                spread = (visible.logsumexp(-1) - kept.logsumexp(-1)).mean()
            losses = torch.stack([index, spread])
        return self.o_proj(out.transpose(1, 2).flatten(2)), losses, selected


def _selected(scores: Tensor, causal: Tensor, select: Select, topk: int) -> Tensor:
    """The keys to attend to, bool [B, S, S]."""
    length = scores.shape[-1]
    if select is Select.ALL:
        return causal.expand_as(scores)
    if select is Select.RECENT:
        return (causal & ~causal.tril(-topk)).expand_as(scores)
    if select is Select.RANDOM:
        scores = torch.rand_like(scores)
    best = scores.masked_fill(~causal, float("-inf")).topk(min(topk, length), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & causal


def _kl(target: Tensor, scores: Tensor, keep: Tensor) -> Tensor:
    """KL(target ‖ softmax(scores over keep)), mean over rows; target is 0 where keep is False."""
    log_z = scores.masked_fill(~keep, float("-inf")).logsumexp(-1)
    cross = log_z - (target * scores).sum(-1)
    divergence: Tensor = cross + torch.special.xlogy(target, target).sum(-1)
    return divergence.mean()
