"""Faults of models that several ranks share: their weights, collectives and runtime, and passes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dsa_compile.weights.plan import Shard
from tests.planted_bugs.catalogue.of_weight import from_zero
from tests.planted_bugs.catalogue.sharded_passes import (
    ALL4,
    CUT2,
    DP2,
    DP2_EP2,
    EP2,
    OUTPUT,
    PASSES,
    TENSOR,
    TP2,
    TP2_DP2,
    TP2_EP2,
)
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import (
    Plant,
    result,
    wrap,
)

COLLECTIVES = "ops.collectives."
FUSED = COLLECTIVES + "all_reduce_add_rms_norm_quantize"
AT_RANK = "weights.ranks.at_rank"
STORED = "weights.stored.StoredReader."


# Parts of weights.
def shard_as(change: Callable[[Shard, Any], tuple[Any, Any]]) -> Plant:
    """A rank's part of a shard is that of another shard, or of another rank."""
    return wrap(AT_RANK, lambda whole, expr, ranks: whole(
        *(change(expr, ranks) if isinstance(expr, Shard) else (expr, ranks))))  # fmt: skip


def from_the_other_end(expr: Shard, ranks: Any) -> Any:
    if expr.dim == 1 and expr.stacked == 1:
        ranks = {**ranks, expr.axis: expr.ranks - 1 - ranks[expr.axis]}
    return expr, ranks


def by_the_place_in_the_lane(expr: Shard, ranks: Any) -> Any:
    return expr, {**ranks, expr.axis: ranks.get("tp", 0)} if expr.stacked > 1 else ranks


def first_scales(_: None, self: Any, part: Any, matrix: Any, window: Any, *given: Any) -> None:
    from dsa_compile.weights.block_fp8 import BLOCK, blocks
    from dsa_compile.weights.stored import FP8

    rows, scales = window[0], given[1]
    if scales is not None and self._homes[part.key].tensors[part.key].dtype == FP8:
        down = slice(rows.start // BLOCK, blocks(rows.stop))
        scales.copy_(self._scales(part, down)[:, : scales.shape[1]])


def first_columns(whole: Any, self: Any, part: Any, matrix: Any, window: Any, *given: Any) -> Any:
    left = window[1].start // 128 * 128
    return whole(self, part, replace(matrix, first=matrix.first - left), window, *given)


def first_column(whole: Any, self: Any, key: Any, shape: Any, window: Any, *given: Any) -> None:
    first, out = given
    first -= window[1].start if len(shape) == 2 else 0
    whole(self, key, shape, window, first, out)


def lanes_last(numbers: Any, layout: Any, rank: int) -> Any:
    return {**numbers, "world": rank % layout.tp * layout.dp + rank // layout.tp}


WEIGHTS = (
    Fault("ranks-heads-from-the-other-end", "a rank reads the other rank's part of columns",
          shard_as(from_the_other_end), OUTPUT, "weight", options=TP2),
    Fault("pieces-of-a-rank-in-a-run", "a rank reads as many pieces one behind another",
          shard_as(lambda expr, ranks: (replace(expr, stacked=1,
             length=expr.length * expr.stacked), ranks)), "mlp.experts.gate_up_proj", "weight",
          options=TP2),
    Fault("pieces-by-the-place-in-the-lane", "of pieces a rank reads by its place in its lane",
          shard_as(by_the_place_in_the_lane), "mlp.experts.gate_up_proj", "weight", recipe="bf16",
          options=TP2_DP2),
    Fault("heads-of-the-first-rank", "a rank's heads are read from the first head on",
          wrap("weights.windows._pieces", lambda whole, source, target, window: whole(source,
             target, from_zero(target, window, split=False))), "self_attn.w_uk", "weight",
          recipe="bf16", options=TP2_EP2),
    Fault("scales-of-the-first-columns", "stored scales of a rank's columns: the first ones",
          result(STORED + "read_matrix", first_scales), OUTPUT + "_scale_inv", "weight",
          recipe="fp8", model="broad-fp8", options=TP2),
    Fault("first-columns-quantised", "a rank's columns are quantised from the first ones",
          wrap(STORED + "_quantize", first_columns), OUTPUT, "weight", recipe=TENSOR, model="broad",
          options=TP2),
    Fault("columns-begin-at-the-first", "columns of a plain parameter are read from the first",
          wrap(STORED + "_read_plain", first_column), OUTPUT, "weight", options=CUT2),
    Fault("spread-scales-of-the-first-columns", "scales of columns, from the row's first block",
          wrap(STORED + "_spread_scales", lambda whole, self, part, rows, columns: whole(self,
             part, rows, slice(0, columns.stop - columns.start))), OUTPUT, "weight", recipe="bf16",
          model="broad-fp8", options=TP2),
    Fault("control-ranks-place-by-place", "ranks of all lanes are numbered place by place",
          result("facts.layout.Layout.numbers", lanes_last), where="weight", options=ALL4),
)  # fmt: skip


# Collectives.
def summed_with_the_stream(whole: Any, x: Any, *given: Any) -> Any:
    axis, ranks, residual, *rest = given
    return whole(x + residual, axis, ranks, torch.zeros_like(residual), *rest)


def stream_of_one_rank(found: Any, x: Any, axis: str, ranks: int, residual: Any, *_: Any) -> Any:
    return (*found[:3], residual + x)


def as_they_lie(whole: Any, x: Any, axis: str, ranks: int) -> Any:
    from dsa_compile.ops.collectives import communicator_of

    if ranks == 1:
        return whole(x, axis, ranks)
    return communicator_of(axis, ranks).gather(x, axis, ranks).reshape(*x.shape[:-1], -1)


def rounded_once(whole: Any, parts: Any) -> Any:
    return sum(part.float() for part in parts).to(parts[0].dtype).contiguous()


def lane_by_lane(found: Any, xs: Any, axis: str, ranks: int) -> Any:
    return [part.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(0, 1) for part in found]


KERNELS = (
    Fault("gathered-rows-not-columns", "ranks' columns are joined as rows and reshaped",
          wrap(COLLECTIVES + "columns_of_ranks", lambda whole, parts: (torch.cat(list(parts),
             0).view(*parts[0].shape[:-1], -1))), "all_gather", "kernel", options=TP2),
    Fault("columns-by-turns", "columns of ranks are laid out by turns",
          wrap(COLLECTIVES + "columns_of_ranks", lambda whole, parts: (torch.stack(list(parts),
             -1).flatten(-2))), "all_gather", "kernel", recipe="bf16", model="trained",
          options=EP2),
    Fault("columns-as-they-lie", "gathered columns are viewed rank by rank",
          wrap(COLLECTIVES + "all_gather", as_they_lie), "all_gather", "kernel", options=TP2),
    Fault("tokens-of-lanes-by-turns", "tokens of lanes are laid out by turns",
          result(COLLECTIVES + "all_gather_many", lane_by_lane), "all_gather_many", "kernel",
          recipe="bf16", options=DP2),
    Fault("stream-summed-over-ranks", "every rank adds the stream before the sum",
          wrap(FUSED, summed_with_the_stream), "all_reduce_add_rms_norm_quantize", "kernel",
          recipe=TENSOR, model="broad", options=TP2),
    Fault("stream-of-one-rank", "the stream behind the norm has the own rank's part",
          result(FUSED, stream_of_one_rank), "all_reduce_add_rms_norm_quantize", "kernel",
          recipe="fp8", model="broad-fp8", options=TP2),
    Fault("first-expert-is-absent", "a rank's first expert counts as another rank's",
          result("ops.moe.place_experts", lambda found, *_: found.masked_fill(found <= 0, -1)),
          "place_experts", "kernel", options=TP2_EP2),
    Fault("control-sum-rounded-once", "sums over ranks are made in fp32 and rounded once",
          wrap(COLLECTIVES + "sum_of_ranks", rounded_once), where="kernel", recipe="bf16",
          model="trained", options=TP2_DP2),
)  # fmt: skip


# The runtime of ranks.
def writes_row_0(found: Any, batch: Any, *_: Any, **__: Any) -> Any:
    slots = found.slot_mapping.copy()
    slots[batch.num_tokens :] = 0
    return replace(found, slot_mapping=slots)


def rows_of_the_place(whole: Any, self: Any, x: Any, axis: str, ranks: int) -> Any:
    from dsa_compile.ops.collectives import sum_of_ranks

    own = self._rank % ranks
    return sum_of_ranks([part.chunk(ranks)[own] for part in self.gather(x, axis, ranks)])


class _InTurn:
    """A layout whose ranks are of the lanes in turn."""

    def __init__(self, layout: Any) -> None:
        self._layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layout, name)

    def numbers(self, rank: int) -> dict[str, int]:
        return {**self._layout.numbers(rank), "dp": rank % self._layout.dp}


def dealt_in_turn(whole: Any, group: Any, *given: Any) -> Any:
    right, group._layout = group._layout, _InTurn(group._layout)
    try:
        return whole(group, *given)
    finally:
        group._layout = right


def sent_once(planting: Any) -> None:
    known: dict[int, Any] = {}

    def first(whole: Any, rows: Any, states: Any, counts: Any) -> Any:
        kept = [known.setdefault(row, state) for row, state in zip(rows, states, strict=True)]
        return whole(rows, kept, counts)

    planting.wrap("runtime.sampling.draw_options.records_of", first)


def own_last(found: Any, self: Any, own: Any) -> Any:
    def moved(every: list[Any], count: int) -> list[Any]:
        return [*every[count:], *every[:count]]

    rows = len(own.logits)
    logits = np.concatenate([found.logits[rows:], found.logits[:rows]])
    prompt = moved(found.prompt, len(own.prompt))
    return replace(found, logits=logits, prompt=prompt, drafts=moved(found.drafts, len(own.drafts)))


def first_targets(found: Any, prompt: Any, *_: Any) -> Any:
    return found and replace(found, targets=prompt.targets[: len(found.rows)])


RUNTIME = (
    Fault("padding-writes-the-first-row", "tokens that pad a lane write the first cache row",
          result("runtime.execution.idle_rows.padded", writes_row_0), "idle_rows", "runtime",
          options=DP2_EP2),
    Fault("rows-of-the-place-in-the-lane", "a rank takes rows of a sum by its place in its lane",
          wrap("runtime.ranks.gloo.GlooCommunicator.reduce_scatter", rows_of_the_place), "gloo",
          "runtime", options=TP2_DP2),
    Fault("plans-dealt-in-turn", "ranks are sent the plans of lanes in turn",
          wrap("runtime.ranks.group.RankGroup._run", dealt_in_turn), "group", "runtime",
          options=ALL4),
    Fault("sampling-sent-once-a-row", "how a request samples is sent once a row",
          sent_once, "draw_options",
          "runtime", options=TP2, hidden_by="async_scheduling=False"),
    Fault("targets-of-the-first-lane", "tokens to score of a lane are the first of all lanes",
          result("runtime.ranks.lanes._prompt", first_targets), "lanes", "runtime",
          options=DP2_EP2),
    Fault("own-lane-last", "logits of the other lanes come before those of the first one",
          result("runtime.ranks.lane_results.LaneResults.logits", own_last), "lane_results",
          "runtime", recipe="bf16", options=DP2),
    Fault("tables-of-the-first-lane", "block tables of a lane are those of the first requests",
          result("runtime.ranks.lanes._requests", lambda found, batch, *_: replace(found,
             block_tables=batch.block_tables[: len(found.block_tables)])), "lanes", "runtime",
          recipe="fp8", model="wide", options=DP2_EP2),
    Fault("control-least-busy-lane", "a request goes to the lane with the fewest requests",
          wrap("runtime.scheduling.lanes.LaneScheduler._lane_for", lambda whole, self, request:
             (min(self.lanes, key=lambda lane: len(lane.requests)))), where="runtime",
          options=DP2_EP2),
)  # fmt: skip

FAULTS = (*PASSES, *WEIGHTS, *KERNELS, *RUNTIME)
