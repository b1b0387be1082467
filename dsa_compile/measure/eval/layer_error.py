"""Layer errors: how far an artifact departs from a more exact one after each layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.probe import ProbeRunner
from dsa_compile.measure.eval.progress import Tick, ignore

ACCUMULATED, ISOLATED = "accumulated", "isolated"


@dataclass(frozen=True)
class LayerError:
    """The residual stream after one layer, against the reference's.

    Attributes:
        layer: its number in the model.
        mode: ``accumulated``: each artifact runs on its own. ``isolated``: the layer is given the
            reference's input, so the error is this layer's alone.
        tokens: compared.
        cosine: mean of the tokens' cosine similarities.
        worst_cosine: the least of them.
        max_abs: largest difference of an element.
        relative: norm of all differences over the norm of the reference.
    """

    layer: int
    mode: str
    tokens: int
    cosine: float
    worst_cosine: float
    max_abs: float
    relative: float


def compare_hidden(
    layer: int, mode: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> LayerError:
    """Compare residual streams ``[T, H]``, sequence by sequence, in fp64."""
    a, b = torch.cat(list(ours)).double(), torch.cat(list(theirs)).double()
    norms = a.norm(dim=-1) * b.norm(dim=-1)
    cosine = (a * b).sum(-1) / norms.clamp(min=1e-300)
    return LayerError(
        layer=layer,
        mode=mode,
        tokens=len(a),
        cosine=cosine.mean().item(),
        worst_cosine=cosine.min().item(),
        max_abs=(a - b).abs().max().item(),
        relative=((a - b).norm() / b.norm().clamp(min=1e-300)).item(),
    )


def require_same_model(loaded: LoadedArtifact, reference: LoadedArtifact) -> None:
    """Raise UserError unless both have the same geometry and layers.

    How the checkpoints are quantised may differ: that is one of the things to compare.
    """
    ours = [layer.index for layer in loaded.manifest.layers]
    theirs = [layer.index for layer in reference.manifest.layers]
    plain = (replace(s.spec, quantization=None) for s in (loaded, reference))
    if len(set(plain)) > 1 or ours != theirs:
        raise UserError(
            f"{reference.name} is not a reference for {loaded.name}: they are compiled from "
            "different models or layers"
        )


def measure_layers(
    runner: ProbeRunner,
    reference: ProbeRunner,
    layers: Sequence[int],
    sequences: Sequence[Sequence[int]],
    tick: Tick = ignore,
) -> list[LayerError]:
    """Measure every layer in both modes.

    Args:
        runner: of the artifact.
        reference: of the reference, over the same layers.
        layers: their numbers.
        sequences: token ids; at least one.
        tick: called as the measurement goes on.

    Raises:
        UserError: only one of the two fuses norms across layers.
    """
    ours: dict[str, list[list[Tensor]]] = {ACCUMULATED: [], ISOLATED: []}
    theirs = []
    for done, sequence in enumerate(sequences):
        given = reference.trace(sequence)
        theirs.append(given.hidden[1:])
        ours[ACCUMULATED].append(runner.trace(sequence).hidden[1:])
        ours[ISOLATED].append(runner.isolated(sequence, given))
        tick((done + 1) / len(sequences))
    return [
        compare_hidden(layer, mode, [h[position] for h in found], [h[position] for h in theirs])
        for mode, found in ours.items()
        for position, layer in enumerate(layers)
    ]
