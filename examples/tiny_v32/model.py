"""A small model of sparse attention and its multi-token-prediction module, in plain PyTorch.

Parameter names are the hub's, except that a layer's experts are fused into two matrices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tiny_v32.attention import Attention, Aux, RMSNorm, Select, Selected, rope_tables
from examples.tiny_v32.config import TinyConfig


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Router(nn.Module):
    """Sigmoid scores, the best groups, and the best experts in them; balanced without a loss."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weight of every expert for x [..., hidden]: fp32 [..., experts], 0 where not chosen."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = scores.detach() + self.e_score_correction_bias
        groups = choice.unflatten(-1, (config.n_group, -1))
        best_groups = groups.topk(2, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
        open_groups = torch.zeros_like(groups[..., 0], dtype=torch.bool)
        open_groups = open_groups.scatter(-1, best_groups, True)
        choice = groups.masked_fill(~open_groups.unsqueeze(-1), float("-inf")).flatten(-2)
        best = choice.topk(config.num_experts_per_tok, dim=-1).indices
        chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
        if self.training:
            self.load += chosen.flatten(0, -2).sum(0)
        weights = scores * chosen
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the bias one step towards an even load (DeepSeek-V3, section 2.1.2)."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MoE(nn.Module):
    """Mixture of experts. All experts run on all tokens: at this size that is the fast way."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden, self.inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config)
        rows = config.n_routed_experts * self.inner
        # Rows (and columns of down) of expert e are e * inner … (e + 1) * inner.
        self.gate_proj = nn.Linear(hidden, rows, bias=False)
        self.up_proj = nn.Linear(hidden, rows, bias=False)
        self.down_proj = nn.Linear(rows, hidden, bias=False)
        self.shared_experts = MLP(hidden, self.inner * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).repeat_interleave(self.inner, dim=-1)
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(inner * weights.to(inner.dtype)) + self.shared_experts(x)
        return out


class DecoderLayer(nn.Module):
    """Attention and a feed-forward part, each on a normed copy of the residual stream."""

    def __init__(self, config: TinyConfig, dense: bool, owns_indexer: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config, owns_indexer)
        self.mlp = MLP(config.hidden_size, config.intermediate_size) if dense else MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = 0.0  # of both parts' outputs, while training

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        select: Select,
        aux: Aux,
        selected: Selected | None = None,
    ) -> tuple[Tensor, Tensor, Selected | None]:
        """x [B, S, hidden] to the same shape; with it what :class:`Attention` gives beside it."""
        normed = self.input_layernorm(x)
        out, losses, selected = self.self_attn(normed, rope, select, aux, selected)
        x = x + self._drop(out)
        return x + self._drop(self.mlp(self.post_attention_layernorm(x))), losses, selected

    def _drop(self, x: Tensor) -> Tensor:
        # A dropout of 0 would still draw random numbers.
        return F.dropout(x, self.dropout) if self.training and self.dropout else x


class MTP(nn.Module):
    """Predicts token t + 2 from the model's output at t and the embedding of token t + 1.

    Embedding and head are the model's own. The output at t is taken after the final norm, as
    serving engines pass it to the draft.
    """

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = RMSNorm(hidden, config.rms_norm_eps)
        self.hnorm = RMSNorm(hidden, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = DecoderLayer(config, dense=False)
        self.norm = RMSNorm(hidden, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        next_embedding: Tensor,
        rope: tuple[Tensor, Tensor],
        select: Select,
        aux: Aux,
    ) -> tuple[Tensor, Tensor]:
        """Both inputs [B, S, hidden]; gives what the head takes, and the auxiliary losses."""
        joined = torch.cat([self.enorm(next_embedding), self.hnorm(hidden)], dim=-1)
        x, losses, _ = self.layer(self.eh_proj(joined), rope, select, aux)
        return self.norm(x), losses


class TinyModel(nn.Module):
    """The whole model. ``mtp`` is None where the configuration has no such layer."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        dense = config.first_k_dense_replace
        self.layers = nn.ModuleList(
            DecoderLayer(config, i < dense, config.owns_indexer(i))
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = MTP(config) if config.num_nextn_predict_layers else None

    def forward(
        self, ids: Tensor, select: Select, aux: Aux = Aux.NONE, mtp: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits for int64 ids [B, S].

        Returns:
            Logits of token t + 1 [B, S, vocab]; the MTP module's of token t + 2 [B, S - 1, vocab],
            or None without it; the two auxiliary losses of :class:`Attention`, summed over layers
            (fp32 [2]).
        """
        rope = rope_tables(self.config, ids.shape[1], ids.device)
        embedded = self.embed_tokens(ids)
        x, losses = embedded, embedded.new_zeros(2, dtype=torch.float)
        selected: Selected | None = None
        for layer in self.layers:
            x, layer_losses, selected = layer(x, rope, select, aux, selected)
            losses = losses + layer_losses
        hidden = self.norm(x)
        if not mtp or self.mtp is None:
            return self.lm_head(hidden), None, losses
        # The last position has no next token; running it keeps the shapes of all layers equal.
        following = torch.cat([embedded[:, 1:], embedded[:, -1:]], dim=1)
        drafted, layer_losses = self.mtp(hidden, following, rope, select, aux)
        return self.lm_head(hidden), self.lm_head(drafted[:, :-1]), losses + layer_losses

    def set_dropout(self, rate: float) -> None:
        """Drop this share of what every attention and feed-forward part adds, while training."""
        for layer in self.decoder_layers():
            layer.dropout = rate

    def decoder_layers(self) -> list[DecoderLayer]:
        """Every layer, the MTP module's last."""
        return [m for m in self.modules() if isinstance(m, DecoderLayer)]

    def routers(self) -> list[Router]:
        """Every router, in layer order, the MTP module's last."""
        return [m for m in self.modules() if isinstance(m, Router)]

    def indexer_parameters(self) -> list[nn.Parameter]:
        """The parameters that the indexer's loss trains."""
        return [p for name, p in self.named_parameters() if ".indexer." in name]

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fan-in scaled normal weights; outputs into the residual stream are scaled down."""
        generator = torch.Generator().manual_seed(seed)
        depth = 2 * (self.config.num_hidden_layers + 1)
        for name, tensor in self.named_parameters():
            if tensor.dim() < 2:
                continue
            std = 0.02 if "embed_tokens" in name or "lm_head" in name else tensor.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= depth**-0.5
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
