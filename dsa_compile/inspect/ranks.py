"""Exchanges of ranks: every collective of a step; and the bytes that a rank holds."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsa_compile.inspect.store import Store, ranges
from dsa_compile.ir.graph import Graph, Node
from dsa_compile.ir.plan import MODEL

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4,
          "uint8": 1}  # fmt: skip
# Bytes that a rank sends, as a multiple of its operand's rows, where each rank sends every other
# one what that needs: of an all-reduce in two steps, a part to each and then the sum of its own
# part; of a reduce-scatter, whose operand has the rows of all, each its rows.
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_reduce_add_rms_norm_quantize": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "all_gather_many": lambda n: n - 1,
    "reduce_scatter": lambda n: n - 1,
}


@dataclass(frozen=True)
class Message:
    """One collective of a region.

    Attributes:
        node: its name in the graph.
        op: such as ``all_reduce`` or ``all_gather``.
        axis: of the layout.
        ranks: that meet.
        row_bytes: of a rank's operand, or of all that travel together, for each row.
        rows: ``T``, tokens of the step, or ``N``, rows whose logits are wanted.
        path: the module that it belongs to.
    """

    node: str
    op: str
    axis: str
    ranks: int
    row_bytes: int
    rows: str
    path: str

    @property
    def sent(self) -> float:
        """Bytes that a rank sends for a row, at least."""
        return self.row_bytes * float(_SENT[self.op](self.ranks))


@dataclass(frozen=True)
class Exchange:
    """Messages and weight bytes of the calls of one region.

    Attributes:
        region: its kind.
        layers: numbers of the layers that run it, as text; empty for what is no layer.
        calls: how many calls there are.
        messages: of one call, in order.
        weight_bytes: of one call's weights on one rank.
    """

    region: str
    layers: str
    calls: int
    messages: tuple[Message, ...]
    weight_bytes: int

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in one call for a row."""
        return sum(message.sent for message in self.messages)


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds, from the plans alone.

    Attributes:
        weights: each counted once, however many calls take it.
        token: of all caches, for one token.
    """

    weights: int
    token: int

    def tokens(self, memory: float, block_size: int) -> int:
        """Tokens that the caches have room for, in whole blocks; 0 where the weights do not fit.

        Args:
            memory: bytes that weights and caches may take.
            block_size: tokens of a block.
        """
        return max(0, int((memory - self.weights) // (self.token * block_size)) * block_size)


def held(store: Store) -> Held:
    """The bytes that one rank of an artifact holds.

    Raises:
        ArtifactError: the weight plan is damaged.
    """
    plan, manifest = _weight_plan(store), store.manifest
    weights: dict[str, int] = {}
    for call in manifest.calls:
        for entry in plan.get(call.kind, {}).values():
            made = json.dumps(entry, sort_keys=True)
            for name, value in call.vars.items():
                made = made.replace(f"{{{name}}}", value)
            weights[made] = _bytes(entry)
    caches = [cache for each in manifest.cache_owners.values() for cache in each]
    return Held(sum(weights.values()), sum(c.width * _BYTES[c.dtype] for c in caches))


def exchanges(store: Store, plan: str = MODEL) -> list[Exchange]:
    """Exchanges of every kind of region of a plan, in the order in which a step runs them.

    Variants list the same collectives; the first one stands for all.

    Args:
        store: the artifact's.
        plan: its name.

    Raises:
        ArtifactError: a file of the artifact is damaged.
    """
    found = []
    of_plan = store.manifest.plans[plan].calls
    for kind in dict.fromkeys(call.kind for call in of_plan):
        graph = next(g for g in store.final.values() if g.kind == kind)
        calls = [call for call in of_plan if call.kind == kind]
        layers = [call.layer for call in calls if call.layer is not None]
        weights = sum(map(_bytes, _weight_plan(store).get(kind, {}).values()))
        found.append(Exchange(kind, ranges(layers), len(calls), messages(graph), weights))
    return found


def messages(graph: Graph) -> tuple[Message, ...]:
    """The collectives of a graph, in order."""
    return tuple(_message(graph, node) for node in graph.calls if node.op_name in _SENT)


def exchange(graph: Graph, node: Node) -> str:
    """Text on what a call exchanges with other ranks; empty if it is no collective."""
    if node.op_name not in _SENT:
        return ""
    message = _message(graph, node)
    return (
        f"{message.ranks} ranks ({message.axis}): {message.row_bytes:,} bytes a row, "
        f"{message.sent:,.0f} sent"
    )


def _message(graph: Graph, node: Node) -> Message:
    several = node.op_name == "all_gather_many"
    operands = [graph.nodes[name] for name in (node.inputs if several else node.inputs[:1])]
    size = sum(math.prod(o.val["shape"][1:]) * _BYTES[o.val["dtype"]] for o in operands)
    axis, ranks, rows = node.args[1], node.args[2], operands[0].val["shape"][0]
    return Message(node.name, node.op_name, axis, ranks, size, str(rows), node.path)


def _weight_plan(store: Store) -> Mapping[str, Any]:
    path = store.manifest.weights.plan
    return {} if path is None else store.read_json(path)


def _bytes(entry: Mapping[str, Any]) -> int:
    return int(math.prod(entry["shape"])) * _BYTES.get(entry["dtype"], 1)
