"""Results as one picture: a panel for each measure that has something to draw."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.indexer_overlap import Overlap
from dsa_compile.measure.eval.layer_error import LayerError
from dsa_compile.measure.eval.mtp_acceptance import GENERATED, Acceptance
from dsa_compile.measure.eval.perplexity import Perplexity
from dsa_compile.measure.eval.recall_accuracy import Recall
from dsa_compile.measure.eval.results import ArtifactResults

_PANEL = (5.0, 3.6)  # inches
_COLUMNS = 3


def check_plot(path: Path) -> None:
    """Raise UserError if a plot could not be saved there, before hours are spent measuring."""
    try:
        import matplotlib.backends.backend_agg as backend
    except ImportError:
        raise UserError(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out"
        ) from None
    known = backend.FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise UserError(f"{path}: a plot is saved as .png, .pdf or .svg")


def save_plot(path: Path, artifacts: Sequence[ArtifactResults]) -> bool:
    """Draw recall, perplexity, overlap, acceptance and layer errors, as far as measured.

    Returns:
        Whether there was anything to draw; if not, no file is written.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    panels: tuple[tuple[type, Callable[[Any, Sequence[ArtifactResults]], None]], ...] = (
        (Recall, _recall),
        (Perplexity, _perplexity),
        (Overlap, _overlap),
        (Acceptance, _acceptance),
        (LayerError, _layers),
    )
    wanted = [draw for kind, draw in panels if any(a.of_type(kind) for a in artifacts)]
    if not wanted:
        return False
    columns = min(len(wanted), _COLUMNS)
    rows = -(-len(wanted) // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * rows), layout="constrained")
    for number, draw in enumerate(wanted, start=1):
        axes = figure.add_subplot(rows, columns, number)
        draw(axes, artifacts)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="x-small")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return True


def _recall(axes: Any, artifacts: Sequence[ArtifactResults]) -> None:
    for artifact in artifacts:
        lines: dict[str, list[Recall]] = {}
        for row in artifact.of_type(Recall):
            lines.setdefault(row.selection, []).append(row)
        for selection, rows in lines.items():
            axes.plot(
                [row.distance for row in rows],
                [row.accuracy for row in rows],
                marker="o",
                label=f"{artifact.name}, {selection}",
            )
    axes.set(
        title="Recall", xlabel="distance (tokens)", ylabel="answered right", ylim=(-0.03, 1.03)
    )


def _perplexity(axes: Any, artifacts: Sequence[ArtifactResults]) -> None:
    rows = [(artifact.name, row) for artifact in artifacts for row in artifact.of_type(Perplexity)]
    labels = [f"{name}, {row.selection}" for name, row in rows]
    axes.barh(labels[::-1], [row.per_token for _, row in rows][::-1])
    axes.set_xscale("log")
    axes.set(title="Perplexity", xlabel="per token")


def _overlap(axes: Any, artifacts: Sequence[ArtifactResults]) -> None:
    for artifact in artifacts:
        groups: dict[str, dict[int, list[float]]] = {}
        for row in artifact.of_type(Overlap):
            groups.setdefault(row.selection, {}).setdefault(row.length, []).append(row.mean)
        for selection, lengths in groups.items():
            axes.plot(
                list(lengths),
                [sum(layers) / len(layers) for layers in lengths.values()],
                marker="o",
                label=f"{artifact.name}, {selection}",
            )
    axes.set_xscale("log")
    axes.set(title="Overlap with the fp64 indexer", xlabel="tokens", ylabel="mean over layers")


def _acceptance(axes: Any, artifacts: Sequence[ArtifactResults]) -> None:
    for artifact in artifacts:
        rows = [row for row in artifact.of_type(Acceptance) if row.source == GENERATED]
        depths = [row.depth for row in rows]
        axes.plot(depths, [row.share for row in rows], marker="o", label=artifact.name)
        axes.set_xticks(depths)
    axes.set(title="Drafts accepted", xlabel="depth", ylabel="share", ylim=(-0.03, 1.03))


def _layers(axes: Any, artifacts: Sequence[ArtifactResults]) -> None:
    for artifact in artifacts:
        lines: dict[str, list[LayerError]] = {}
        for row in artifact.of_type(LayerError):
            lines.setdefault(row.mode, []).append(row)
        for mode, rows in lines.items():
            layers = [row.layer for row in rows]
            errors = [row.relative for row in rows]
            axes.plot(layers, errors, marker="o", label=f"{artifact.name}, {mode}")
            axes.set_xticks(layers)
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(bottom=0.0)
    axes.set(title="Error after each layer", xlabel="layer", ylabel="relative")
