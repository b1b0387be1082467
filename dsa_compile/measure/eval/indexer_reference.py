"""The lightning indexer in fp64, written from its definition and the model's own weights.

It shares no code with the ops or the graphs: what it disagrees with is wrong or rounded.
Sources: DeepSeek-V3.2-Exp's report; ``DeepseekV32Indexer`` and ``GlmMoeDsaIndexer`` of
transformers.
"""

import torch
from torch import Tensor

from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.measure.eval.constants import Rope
from dsa_compile.weights.checkpoint import Checkpoint

_EPS = 1e-6  # of the norms inside attention, whatever the configuration says
_ROWS = 128  # queries scored at once


class IndexerReference:
    """The indexer of one layer, whose number is ``layer``.

    Args:
        spec: the model's geometry.
        checkpoint: the model's weights, with this layer among them.
        layer: its number.
        rope: rotary frequencies.
    """

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, layer: int, rope: Rope) -> None:
        self.layer = layer
        self._spec, self._rope = spec, rope
        prefix = f"model.layers.{layer}."

        def read(name: str) -> Tensor:
            out = torch.empty(checkpoint.shape(prefix + name), dtype=torch.float32)
            checkpoint.read_into(prefix + name, out)
            return out.double()

        self._input_norm = read("input_layernorm.weight")
        self._q_a = read("self_attn.q_a_proj.weight")
        self._q_norm = read("self_attn.q_a_layernorm.weight")
        self._wq_b = read("self_attn.indexer.wq_b.weight")
        self._wk = read("self_attn.indexer.wk.weight")
        self._k_norm = (
            read("self_attn.indexer.k_norm.weight"),
            read("self_attn.indexer.k_norm.bias"),
        )
        self._head_weights = read("self_attn.indexer.weights_proj.weight")

    def scores(self, hidden: Tensor) -> Tensor:
        """Scores of every key for every query.

        Args:
            hidden: ``[L, H]``, any dtype: the residual stream at the layer's input, positions 0 on.

        Returns:
            fp64 ``[L, L]``, -inf where the key comes after the query.
        """
        spec = self._spec
        x = _rms_norm(hidden.double(), self._input_norm, spec.rms_norm_eps)
        q = _rms_norm(x @ self._q_a.T, self._q_norm, _EPS) @ self._wq_b.T
        q = self._rotate(q.unflatten(-1, (spec.index_n_heads, spec.index_head_dim)))
        k = x @ self._wk.T
        k = torch.nn.functional.layer_norm(k, k.shape[-1:], *self._k_norm, _EPS)
        k = self._rotate(k.unsqueeze(1)).squeeze(1)
        weights = x @ self._head_weights.T * spec.index_n_heads**-0.5
        scores = torch.cat(
            [
                torch.einsum("qh,qhk->qk", w, (part @ k.T * spec.index_head_dim**-0.5).relu())
                for part, w in zip(q.split(_ROWS), weights.split(_ROWS), strict=True)
            ]
        )
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf"))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate the leading part of ``[L, heads, D]``, pairing its halves or neighbours."""
        angles = torch.arange(len(x)).double()[:, None] * self._rope.inv_freq.double()
        cos = (angles.cos() * self._rope.scaling).unsqueeze(1)
        sin = (angles.sin() * self._rope.scaling).unsqueeze(1)
        half = len(self._rope.inv_freq)
        rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
        if self._spec.index_rope_interleaved:
            first, second = rotated[..., 0::2], rotated[..., 1::2]
        else:
            first, second = rotated.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
