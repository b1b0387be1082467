"""Results as tables to read: one artifact, or several side by side."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from dsa_compile.measure.eval.hf_agreement import GreedyAgreement, LogitAgreement
from dsa_compile.measure.eval.indexer_overlap import Overlap
from dsa_compile.measure.eval.layer_error import ACCUMULATED, ISOLATED, LayerError
from dsa_compile.measure.eval.mtp_acceptance import (
    ENGINE,
    GENERATED,
    PREDICTED,
    TEXT,
    Acceptance,
)
from dsa_compile.measure.eval.perplexity import Perplexity
from dsa_compile.measure.eval.recall_accuracy import Recall
from dsa_compile.measure.eval.results import ArtifactResults


def tables(artifacts: Sequence[ArtifactResults]) -> list[Table]:
    """Table of the artifacts, then a table for each group of measures that was made."""
    makers: tuple[Callable[[Sequence[ArtifactResults]], Table], ...] = (
        _artifacts,
        _language,
        _indexer,
        _drafts,
        _layers,
        _agreement,
    )
    made = (make(artifacts) for make in makers)
    return [table for table in made if table.row_count]


def _artifacts(artifacts: Sequence[ArtifactResults]) -> Table:
    table = _table("Artifacts", "artifact", "recipe", "passes left out", "digest")
    _numbers(table, "seconds")
    for artifact in artifacts:
        table.add_row(
            artifact.name,
            artifact.recipe,
            ", ".join(artifact.disabled) or "none",
            artifact.digest[:12],
            f"{sum(artifact.seconds.values()):.1f}",
        )
    return table


def _language(artifacts: Sequence[ArtifactResults]) -> Table:
    """Perplexity, and recall by distance: a row for each way to choose keys."""
    recalls = [row for artifact in artifacts for row in artifact.of_type(Recall)]
    distances = sorted({row.distance for row in recalls})
    table = _table("Perplexity, and recall by distance", "artifact", "keys")
    _numbers(table, "perplexity", "per byte", "to sparse", *(f"@{d}" for d in distances))
    for artifact in artifacts:
        scores = {row.selection: row for row in artifact.of_type(Perplexity)}
        recalled = {(r.selection, r.distance): r for r in artifact.of_type(Recall)}
        for selection in _ordered(scores, (key[0] for key in recalled)):
            score, own = scores.get(selection), scores.get("sparse")
            relative = None
            if score and own and score is not own:
                relative = f"{100 * (score.per_token / own.per_token - 1):+.2f} %"
            cells = [recalled.get((selection, distance)) for distance in distances]
            table.add_row(
                artifact.name,
                selection,
                _show(score.per_token if score else None, ".4f"),
                _show(score.per_byte if score else None, ".4f"),
                relative or "",
                *(_percent(cell.accuracy if cell else None) for cell in cells),
            )
    return table


def _indexer(artifacts: Sequence[ArtifactResults]) -> Table:
    """Overlap with the fp64 indexer by length; layers are summarised, the JSON has each."""
    table = _table("Keys attended to, against the fp64 indexer", "artifact", "keys")
    _numbers(table, "tokens", "overlap", "worst layer", "worst row", "margin", "deficit")
    for artifact in artifacts:
        groups: dict[tuple[str, int], list[Overlap]] = {}
        for row in artifact.of_type(Overlap):
            groups.setdefault((row.selection, row.length), []).append(row)
        for (selection, length), rows in groups.items():
            margins = [row.margin for row in rows if row.margin is not None]
            table.add_row(
                artifact.name,
                selection,
                str(length),
                _percent(sum(row.mean for row in rows) / len(rows), 2),
                _percent(min(row.mean for row in rows), 2),
                _percent(min(row.worst for row in rows)),
                _show(min(margins, default=None), ".2g"),
                _show(max(row.deficit for row in rows), ".2g"),
            )
    return table


def _drafts(artifacts: Sequence[ArtifactResults]) -> Table:
    """MTP acceptance by depth."""
    rows = [row for artifact in artifacts for row in artifact.of_type(Acceptance)]
    depths = sorted({row.depth for row in rows})
    table = _table("Drafts accepted (MTP, greedy), by depth", "artifact", "along")
    _numbers(table, *map(str, depths), "drafts", "tokens a step")
    for artifact in artifacts:
        rows = artifact.of_type(Acceptance)
        kinds = [("", source) for source in (TEXT, GENERATED, ENGINE, PREDICTED)]
        kinds += [(text, ENGINE) for text in dict.fromkeys(row.text for row in rows) if text]
        for text, source in kinds:
            found = {r.depth: r for r in rows if (r.text, r.source) == (text, source)}
            if not found:
                continue
            table.add_row(
                artifact.name,
                f"{source}, {Path(text).name}" if text else source,
                *(_percent(r.share if r else None) for r in map(found.get, depths)),
                str(found[1].drafts),
                # the token the model itself gives, and the drafts it accepts
                _show(1 + sum(r.share for r in found.values()), ".2f"),
            )
    return table


def _layers(artifacts: Sequence[ArtifactResults]) -> Table:
    """Error after each layer."""
    table = _table("Residual stream after each layer, against the reference", "artifact")
    _numbers(table, "layer", "relative", "worst cosine", "alone: relative", "worst cosine", "max")
    for artifact in artifacts:
        rows = {(row.layer, row.mode): row for row in artifact.of_type(LayerError)}
        for layer in sorted({layer for layer, _ in rows}):
            own, alone = rows[layer, ACCUMULATED], rows[layer, ISOLATED]
            table.add_row(
                artifact.name,
                str(layer),
                f"{own.relative:.2e}",
                f"{own.worst_cosine:.6f}",
                f"{alone.relative:.2e}",
                f"{alone.worst_cosine:.6f}",
                f"{alone.max_abs:.2e}",
            )
    return table


def _agreement(artifacts: Sequence[ArtifactResults]) -> Table:
    """Logits and greedy generations against references."""
    table = _table("Agreement", "artifact", "with")
    _numbers(table, "max |Δlogit|", "KL", "same top token", "same generations", "tokens before")
    for artifact in artifacts:
        logits = {row.against: row for row in artifact.of_type(LogitAgreement)}
        greedy = {row.against: row for row in artifact.of_type(GreedyAgreement)}
        for name in _ordered(logits, greedy):
            a, g = logits.get(name), greedy.get(name)
            table.add_row(
                artifact.name,
                name,
                _show(a.max_abs if a else None, ".2e"),
                _show(a.kl if a else None, ".2e"),
                _percent(a.same_top if a else None, 2),
                "" if g is None else f"{g.identical}/{g.prompts}",
                "" if g is None else f"{g.matching}/{g.tokens}",
            )
    return table


def _table(title: str, *names: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _numbers(table: Table, *names: str) -> None:
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


def _ordered(*names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for group in names for name in group))


def _show(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"
