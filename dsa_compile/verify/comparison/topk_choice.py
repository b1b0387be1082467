"""Keys chosen by a rewritten indexer, judged by the scores of the indexer that it replaces."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from dsa_compile.measure.eval.indexer_overlap import RowOverlap, compare_rows
from dsa_compile.ops import INDEX_TOPK, PAGED_INDEX_TOPK
from dsa_compile.verify.comparison.delta import Delta, Pair
from dsa_compile.verify.execution.exact import numbers
from dsa_compile.verify.execution.interpreter import Values
from dsa_compile.verify.execution.ranks import on_ranks, parts_of
from dsa_compile.verify.inputs.prompt import Chunk, Prompt


@dataclass(frozen=True)
class Choice:
    """Keys that a replacement chose.

    Attributes:
        overlap: least share of a row's best keys that were chosen.
        margin: median difference of scores between the last of the best keys and the first key left
            out, in standard deviations of the row's scores; None where nothing is left out.
        deficit: the furthest that a chosen key's score lies below the last of the best keys', in
            the same unit: rounding gives little, a wrong indexer gives units.
    """

    overlap: float
    margin: float | None
    deficit: float


def judge_choice(
    delta: Delta,
    pair: Pair,
    values: tuple[Values, Values],
    positions: Any,
    prompt: Prompt,
    chunk: Chunk,
) -> Choice | None:
    """Judge the keys that stand for those of a pair, by the worst rank where ranks differ.

    Args:
        delta: the rewrite.
        pair: names of two values that must agree.
        values: of its two sides, in one step.
        positions: the second value of the pair, as positions where it is a selection handed on.
        prompt: the sequence.
        chunk: the step.

    Returns:
        None if the pair is no choice of keys.
    """
    node = next((n for n in delta.before.nodes if n.name == pair[0]), None)
    if node is None or node.target not in (INDEX_TOPK, PAGED_INDEX_TOPK):
        return None
    given: list[Any] = fx.node.map_arg(list(node.args), lambda n: values[0][n.name])
    if node.target is INDEX_TOPK:
        made = on_ranks(_judge_prompt)(given, positions)
    else:
        judge = partial(_judge_paged, prompt=prompt, chunk=chunk)
        made = on_ranks(judge)(given, values[1][pair[1]])
    choices: Sequence[Choice] = parts_of(made)
    return max(choices, key=lambda choice: choice.deficit)


def _judge_prompt(given: Sequence[Any], chosen: Tensor) -> Choice:
    """Positions chosen among the keys of a whole prompt."""
    q, keys, weights, topk, scale = map(_numbers, given)
    q, keys, weights = (t[0] if q.dim() == 4 else t for t in (q, keys, weights))
    scores = _scores(q, keys, weights, scale)
    return _summary([compare_rows(scores, chosen.flatten(0, -2), topk)])


def _judge_paged(given: Sequence[Any], chosen: Tensor, prompt: Prompt, chunk: Chunk) -> Choice:
    """Rows of a paged cache chosen for the requests of a step."""
    q, weights, cache, _, _, _, topk, scale = map(_numbers, given)
    found, first = [], 0
    for part in chunk.parts:
        mine = slice(first, first + len(part))
        slots = prompt.slots(part.request)[: part.stop]
        scores = _scores(q[mine], cache.flatten(0, 1)[slots], weights[mine], scale)
        found.append(compare_rows(scores, _positions(chosen[mine], slots), topk))
        first += len(part)
    return _summary(found)


def _numbers(value: Any) -> Any:
    return numbers(value) if isinstance(value, Tensor) else value


def _positions(rows: Tensor, slots: Tensor) -> Tensor:
    """Cache rows as positions; a row that is not the sequence's counts as not chosen."""
    table = torch.full((int(max(slots.max(), rows.max())) + 1,), -1)
    table[slots] = torch.arange(len(slots))
    return torch.where(rows < 0, -1, table[rows.long().clamp(min=0)])


def _scores(q: Tensor, keys: Tensor, weights: Tensor, scale: float) -> Tensor:
    """fp64 [n, L], -inf for keys that a row does not see."""
    dots = torch.einsum("nhd,ld->nhl", q.double(), keys.double()) * scale
    scores = torch.einsum("nh,nhl->nl", weights.double(), dots.relu())
    count, length = scores.shape
    position = torch.arange(length - count, length).unsqueeze(1)
    return scores.masked_fill(torch.arange(length) > position, -torch.inf)


def _summary(parts: Sequence[RowOverlap]) -> Choice:
    margin = torch.cat([rows.margin for rows in parts]).nanmedian().item()
    return Choice(
        overlap=min(rows.share.min().item() for rows in parts),
        margin=None if margin != margin else margin,
        deficit=max(rows.deficit.max().item() for rows in parts),
    )
