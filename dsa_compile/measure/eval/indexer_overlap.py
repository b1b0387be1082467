"""Indexer overlap: how many keys a layer attends to are those that an fp64 indexer chooses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.constants import Rope
from dsa_compile.measure.eval.indexer_reference import IndexerReference
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.probe import ProbeRunner
from dsa_compile.measure.eval.progress import Tick, ignore
from dsa_compile.ops import Family, Form, names_of
from dsa_compile.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Overlap:
    """One layer on sequences of one length.

    The reference is given the residual stream at the layer's input as the artifact computed it, so
    rounding in earlier layers is not held against this one.

    Attributes:
        selection: which keys were attended to.
        layer: its number in the model.
        length: tokens of each sequence.
        rows: queries compared: those that see more than ``index_topk`` keys, or all of them in
            sequences where none does.
        mean: of the shares of the reference's keys that were attended to.
        worst: the least of these shares.
        margin: median difference of scores between the last key chosen and the first key left out,
            in standard deviations of the visible keys' scores; None where nothing is left out.
        deficit: the furthest that the score of an attended key lies below the last key chosen by
            the reference, in the same unit: rounding gives little, a wrong indexer gives units.
    """

    selection: str
    layer: int
    length: int
    rows: int
    mean: float
    worst: float
    margin: float | None
    deficit: float


@dataclass(frozen=True)
class RowOverlap:
    """Figures of each row, fp64 [n]: see :class:`Overlap`."""

    share: Tensor
    margin: Tensor
    deficit: Tensor


def lengths_around(topk: int, limit: int) -> list[int]:
    """Lengths below, at and above ``topk``, as far as ``limit`` goes."""
    wanted = [max(1, topk // 2), topk, topk + topk // 2, 4 * topk, 16 * topk]
    return [length for length in dict.fromkeys(wanted) if length <= limit]


def compare_rows(scores: Tensor, slots: Tensor, topk: int) -> RowOverlap:
    """Compare chosen keys with the best of the reference's scores, ties to the lower position.

    Args:
        scores: fp64 ``[n, L]``, -inf for keys that are not visible.
        slots: ``[n, K]``, the positions attended to; -1 for none.
        topk: keys to choose in a row.
    """
    visible = torch.isfinite(scores).sum(-1)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    wanted = torch.arange(scores.shape[1]) < visible.clamp(max=topk).unsqueeze(1)
    reference = torch.zeros_like(wanted).scatter(1, order, wanted)
    columns = torch.where(slots < 0, scores.shape[1], slots.long())
    attended = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool)
    attended = attended.scatter(1, columns, True)[:, :-1]

    ranked = scores.gather(1, order)
    last = visible.clamp(max=topk).unsqueeze(1) - 1
    cut = ranked.gather(1, last).squeeze(1)
    after = ranked.gather(1, (last + 1).clamp(max=scores.shape[1] - 1)).squeeze(1)
    unit = _spread(scores, visible)
    lowest = scores.masked_fill(~attended, float("inf")).amin(-1)
    return RowOverlap(
        share=(reference & attended).sum(-1) / reference.sum(-1).double(),
        margin=torch.where(visible > topk, (cut - after) / unit, torch.nan),
        deficit=((cut - lowest) / unit).clamp(min=0.0),
    )


def _spread(scores: Tensor, visible: Tensor) -> Tensor:
    seen = torch.isfinite(scores)
    values = scores.masked_fill(~seen, 0.0)
    mean = values.sum(-1) / visible
    squares = (values - mean.unsqueeze(1)).square().masked_fill(~seen, 0.0).sum(-1)
    return (squares / visible).sqrt().clamp(min=1e-300)


def references(loaded: LoadedArtifact) -> dict[int, IndexerReference]:
    """The fp64 indexer whose keys each compiled layer attends to, by the layer's number.

    That is the last one before it, where a layer has none of its own.

    Raises:
        UserError: the model's weights or its frequencies cannot be had.
    """
    rope = Rope.of(loaded)
    layers, spec = [layer.index for layer in loaded.manifest.layers], loaded.spec
    checkpoint = Checkpoint.open(loaded.model_dir, spec, layers)
    found: dict[int, IndexerReference] = {}
    for i in layers:  # the first of them has one
        own = spec.kind_of(i).indexer
        found[i] = IndexerReference(spec, checkpoint, i, rope) if own else found[i - 1]
    return found


def measure_overlap(
    runner: ProbeRunner,
    indexers: Mapping[int, IndexerReference],
    sequences: Mapping[int, Sequence[Sequence[int]]],
    topk: int,
    selection: str,
    tick: Tick = ignore,
) -> list[Overlap]:
    """Measure the overlap in every layer at every length.

    Args:
        runner: of the artifact.
        indexers: see :func:`references`; in the artifact's order of layers.
        sequences: by length.
        topk: the model's ``index_topk``.
        selection: noted in the results.
        tick: called as the measurement goes on.

    Raises:
        UserError: the graphs attend in a way that is not known here.
    """
    results = []
    for done, (length, group) in enumerate(sequences.items()):
        first = topk if length > topk else 0
        found: dict[int, list[RowOverlap]] = {layer: [] for layer in indexers}
        for sequence in group:
            trace = runner.trace(sequence)
            if not trace.slots:
                ops = names_of(Family.ATTENTION, Form.FLAT)
                raise UserError(f"the graphs hold no {ops}, whose keys to compare")
            scores: dict[int, Tensor] = {}
            for position, (layer, indexer) in enumerate(indexers.items()):
                if indexer.layer == layer:
                    scores[layer] = indexer.scores(trace.hidden[position])[first:]
                slots = trace.slots[position][first:]
                found[layer].append(compare_rows(scores[indexer.layer], slots, topk))
        results += [_summary(selection, n, length, rows) for n, rows in found.items()]
        tick((done + 1) / len(sequences))
    return results


def _summary(selection: str, layer: int, length: int, rows: list[RowOverlap]) -> Overlap:
    share = torch.cat([row.share for row in rows])
    margin = torch.cat([row.margin for row in rows]).nanmedian().item()
    return Overlap(
        selection=selection,
        layer=layer,
        length=length,
        rows=len(share),
        mean=share.mean().item(),
        worst=share.min().item(),
        margin=None if margin != margin else margin,
        deficit=max(row.deficit.max().item() for row in rows),
    )
