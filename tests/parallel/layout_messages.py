"""Messages that the layers of a model exchange on any layout, from its sizes alone.

``dsa_compile.inspect.ranks`` reads such messages from the graphs of an artifact; here nothing is
compiled, so that each has something to be held to.
"""

from dataclasses import dataclass

from dsa_compile.facts.model_spec import ModelSpec

_WEIGHT, _NUMBER = 4, 8  # bytes of a chosen expert's weight, and of its number
_BLOCK, _SCALE = 128, 4  # values of a token in e4m3 that share a scale, and its bytes

# Bytes that a rank sends, as a multiple of its operand, to every other rank what that needs.
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
}


@dataclass(frozen=True)
class LayerMessage:
    """One collective of a layer.

    Attributes:
        op: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        axis: ``tp``, the ranks of a lane, or ``dp``, the lanes.
        ranks: that meet.
        row_bytes: of a rank's operand, for each token that the rank has.
    """

    op: str
    axis: str
    ranks: int
    row_bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends for each token that it has, at least."""
        return self.row_bytes * float(_SENT[self.op](self.ranks))


@dataclass(frozen=True)
class LayoutMessages:
    """Messages of a step, in order.

    Attributes:
        embedding: of the prologue.
        dense: of a layer with a gated MLP.
        moe: of a layer with routed experts.
        head: of the head; its rows are those whose logits are wanted.
    """

    embedding: tuple[LayerMessage, ...]
    dense: tuple[LayerMessage, ...]
    moe: tuple[LayerMessage, ...]
    head: tuple[LayerMessage, ...]

    def sent(self, spec: ModelSpec) -> float:
        """Bytes that a rank sends in a step, for one token of its own whose logits are wanted."""
        layers = (self.moe if self._routes(spec, kind) else self.dense for kind in spec.layer_kinds)
        every = (self.embedding, *layers, self.head)
        return sum(message.sent for messages in every for message in messages)

    @staticmethod
    def _routes(spec: ModelSpec, name: str) -> bool:
        return any(kind.name == name and kind.mlp == "experts" for kind in spec.kinds)


def messages_of_layout(
    spec: ModelSpec,
    *,
    tp: int = 1,
    dp: int = 1,
    shard_embedding: bool = False,
    value_bytes: int = 2,
    quantized: bool = False,
) -> LayoutMessages:
    """The collectives of a layout; whether experts are whole or cut makes no difference to them.

    Args:
        spec: the model.
        tp: ranks of a lane.
        dp: lanes, which share routed experts and nothing else.
        shard_embedding: whether each rank of a lane has columns of the embedding.
        value_bytes: of an activation: 2 in bf16, 4 in fp32.
        quantized: whether tokens travel to the experts of all lanes in e4m3 with scales, as in the
            recipes of FP8.
    """
    row = spec.hidden_size * value_bytes
    reduce = (LayerMessage("all_reduce", "tp", tp, row),)
    columns = (LayerMessage("all_gather", "tp", tp, row // tp),)
    logits = (LayerMessage("all_gather", "tp", tp, spec.vocab_size // tp * value_bytes),)
    to_experts, from_experts = _lanes(spec, dp, row, quantized) if dp > 1 else ((), ())
    if tp == 1:
        return LayoutMessages((), (), (*to_experts, *from_experts), ())
    return LayoutMessages(
        embedding=columns if shard_embedding else (),
        dense=(*reduce, *reduce),
        moe=(*reduce, *to_experts, *from_experts, *reduce),
        head=logits,
    )


def _lanes(
    spec: ModelSpec, dp: int, row: int, quantized: bool
) -> tuple[tuple[LayerMessage, ...], tuple[LayerMessage, ...]]:
    """Tokens of all lanes go to all experts, with the weights and numbers of their choices."""
    chosen = spec.num_experts_per_tok
    token: tuple[int, ...] = (row,)
    if quantized:
        token = (spec.hidden_size, -(-spec.hidden_size // _BLOCK) * _SCALE)
    gathered = (*token, chosen * _WEIGHT, chosen * _NUMBER)
    to_experts = (LayerMessage("all_gather", "dp", dp, sum(gathered)),)
    return to_experts, (LayerMessage("reduce_scatter", "dp", dp, dp * row),)
