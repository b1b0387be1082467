"""Key selections other than the model's own, put in place of its ops when graphs are bound.

They show what the indexer is worth: ``dense`` attends to every visible key, the controls attend to
as many keys as the model does, but to the wrong ones.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from dsa_compile.errors import UserError
from dsa_compile.ir.region import Region
from dsa_compile.measure.eval.selections import SELECTIONS
from dsa_compile.ops import (
    FACTS,
    REFERENCE,
    ROPE_HALF,
    ROPE_INTERLEAVED,
    Family,
    Form,
    ops_of,
)

INDEX_CACHE = "index_cache"

Overrides = Mapping[OpOverload, Callable[..., Any]]
"""Functions by the op they stand for; of the ops of all recipes, those that the graphs hold."""


def overrides_of(selection: str, seed: int = 0) -> Overrides:
    """The ops a selection replaces.

    Args:
        selection: ``sparse`` replaces nothing. ``dense``: all visible keys. ``random``:
            ``index_topk`` of them at random. ``recent``: the last ``index_topk``. ``interleaved``:
            the indexer's RoPE pairs neighbours instead of halves, or halves instead of neighbours
            where that is what the model does.
        seed: of ``random``; draws depend on it and on the calls made before.

    Raises:
        UserError: an unknown selection.
    """
    match selection:
        case "sparse":
            return {}
        case "dense":
            return _selecting(select_all)
        case "random":
            return _selecting(_RandomKeys(seed).select)
        case "recent":
            return _selecting(select_recent)
        case "interleaved":
            flags = {op: facts.indexer_rope for op, facts in FACTS.items()}
            fused = {op: _negating(op, flag) for op, flag in flags.items() if flag is not None}
            halves, neighbours = REFERENCE[ROPE_HALF], REFERENCE[ROPE_INTERLEAVED]
            return {ROPE_HALF: neighbours, ROPE_INTERLEAVED: halves, **fused}
    raise UserError(f"unknown selection {selection!r}; choose one of {', '.join(SELECTIONS)}")


def replace_ops(regions: Mapping[str, Region], overrides: Overrides) -> dict[str, Region]:
    """Copies of regions that call plain functions where they called the ops of ``overrides``.

    Rotations of the indexer are replaced, those of attention are left.

    Raises:
        UserError: none of the ops is in any region, so that nothing would change.
    """
    copies = {name: region.copy(name) for name, region in regions.items()}
    nodes = [
        node
        for region in copies.values()
        for node in region.graph.nodes
        if node.target in overrides
        and (FACTS[node.target].family is not Family.ROPE or _of_indexer(node))
    ]
    if overrides and not nodes:
        ops = " or ".join(map(str, overrides))
        raise UserError(
            f"the graphs hold no {ops}, which this comparison replaces; "
            "compile with the pass that recognises it"
        )
    for node in nodes:
        node.target = overrides[node.target]
    return copies


def _selecting(function: Callable[..., Tensor]) -> Overrides:
    return dict.fromkeys(ops_of(Family.INDEX_SELECTION, Form.FLAT), function)


def _of_indexer(node: fx.Node) -> bool:
    """Whether what a call makes goes into keys or scores of the indexer."""
    cache = {n for n in node.graph.nodes if n.op == "placeholder" and n.meta["key"] == INDEX_CACHE}
    reached, left = {node}, [node]
    while left:
        users = [user for user in left.pop().users if user not in reached]
        reached.update(users)
        left += users
    return any(cache.intersection(user.all_input_nodes) for user in reached)


def _negating(op: OpOverload, name: str) -> Callable[..., Any]:
    """The op's reference with one of its flags turned round."""
    reference = REFERENCE[op]
    at = [argument.name for argument in op._schema.arguments].index(name)

    def call(*args: Any) -> Any:
        return reference(*args[:at], not args[at], *args[at + 1 :])

    return call


def select_all(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
    scale: float = 1.0,
) -> Tensor:
    """Visible keys, all of them: int32 [T, longest context] physical rows, then -1.

    The arguments are those of ``dsa::paged_index_topk``, or of its FP8 form, which has no scale, as
    in all functions here.
    """
    request, position = _rows(cu_seqlens, context_lens)
    keys = torch.arange(int(context_lens.max()), device=q.device).expand(len(position), -1)
    return _physical(keys, request, position, block_tables, cache.shape[1])


def select_recent(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    topk: int,
    scale: float = 1.0,
) -> Tensor:
    """The last ``topk`` visible keys, latest first: int32 [T, topk] physical rows, then -1."""
    request, position = _rows(cu_seqlens, context_lens)
    keys = position.unsqueeze(1) - torch.arange(topk, device=q.device)
    return _physical(keys, request, position, block_tables, cache.shape[1])


class _RandomKeys:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        cache: Tensor,
        block_tables: Tensor,
        cu_seqlens: Tensor,
        context_lens: Tensor,
        topk: int,
        scale: float = 1.0,
    ) -> Tensor:
        """``topk`` distinct visible keys: int32 [T, topk] physical rows, then -1."""
        request, position = _rows(cu_seqlens, context_lens)
        width = max(int(context_lens.max()), topk)
        draws = torch.rand((len(position), width), generator=self._generator).to(q.device)
        columns = torch.arange(width, device=q.device)
        draws.masked_fill_(columns > position.unsqueeze(1), -1.0)
        keys = draws.topk(topk, dim=1).indices
        return _physical(keys, request, position, block_tables, cache.shape[1])


def _rows(cu_seqlens: Tensor, context_lens: Tensor) -> tuple[Tensor, Tensor]:
    """Request and position of each row, int64 [T]."""
    counts = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    request = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    rows = torch.arange(len(request), device=counts.device)
    position = rows - cu_seqlens[1:].long()[request] + context_lens.long()[request]
    return request, position


def _physical(
    keys: Tensor, request: Tensor, position: Tensor, block_tables: Tensor, block_size: int
) -> Tensor:
    """Positions [T, K] to int32 physical rows; -1 for those before the start or not yet visible."""
    visible = (keys >= 0) & (keys <= position.unsqueeze(1))
    kept = torch.where(visible, keys, 0)
    blocks = block_tables.long()[request].gather(1, kept // block_size)
    return torch.where(visible, blocks * block_size + kept % block_size, -1).int()
