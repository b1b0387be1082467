"""From an artifact directory to a runner: graphs, weights, caches."""

from collections.abc import Mapping
from pathlib import Path

import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.ir.calls import step_calls
from dsa_compile.runtime.devices import device_of
from dsa_compile.runtime.model_runner import ModelRunner
from dsa_compile.weights.checkpoint import Checkpoint
from dsa_compile.weights.materialize import WeightSource, load_layer
from dsa_compile.weights.pack import PackedFile, PackedWeights
from dsa_compile.weights.plan import WeightPlan

# Caches for this many tokens, or for the model's longest sequence if that is shorter, by default.
DEFAULT_CACHE_TOKENS = 65_536
_MOST_ROWS = 2**31 - 1  # the graphs number cache rows in int32


def load_runner(
    path: Path | str,
    *,
    num_blocks: int | None = None,
    verify: str = "full",
    model_dir: Path | None = None,
) -> ModelRunner:
    """Open an artifact, load its weights and make caches.

    Args:
        path: the artifact.
        num_blocks: blocks of each cache; None for :data:`DEFAULT_CACHE_TOKENS`.
        verify: how thoroughly weight files are checked, ``full`` or ``header``.
        model_dir: where the model is now, for an artifact that refers to it and was moved.

    Raises:
        ArtifactError: not a sound artifact, compiled for inspection only, or its weights are
            missing or not the ones compiled.
        CheckpointError: the model's files do not hold what the artifact needs.
        UserError: fewer than one block, or more than int32 numbers or than the memory holds.
    """
    artifact = Artifact.open(path, verify)
    manifest = artifact.manifest
    require_runnable(artifact)
    if num_blocks is None:
        tokens = min(DEFAULT_CACHE_TOKENS, manifest.model.spec.max_position_embeddings)
        num_blocks = -(-tokens // manifest.block_size)
    most = _MOST_ROWS // manifest.block_size
    if not 1 <= num_blocks <= most:
        raise UserError(f"num_blocks={num_blocks} must be from 1 to {most}")
    if model_dir is not None and manifest.weights.mode == "pack":
        raise UserError(
            f"{artifact.path}: holds its weights itself and takes none from {model_dir}; "
            "leave out --model-dir"
        )
    regions = {record.name: artifact.region(record.name) for record in manifest.regions}
    return ModelRunner(manifest, regions, load_weights(artifact, model_dir), num_blocks)


def require_runnable(artifact: Artifact) -> None:
    """Raise ArtifactError if it was compiled to be read and not run."""
    manifest = artifact.manifest
    if manifest.compile.stop_after:
        raise ArtifactError(
            f"{artifact.path}: compiled with --stop-after {manifest.compile.stop_after}, "
            "for inspection; compile without it to run"
        )
    if manifest.weights.plan is None:
        raise ArtifactError(
            f"{artifact.path}: compiled with --weights none, it holds graphs only; "
            "compile with --weights reference or pack to run"
        )


def load_weights(artifact: Artifact, model_dir: Path | None) -> list[Mapping[str, torch.Tensor]]:
    """The weights of a runnable artifact by key, for each call of a step in order.

    Raises:
        ArtifactError: the weights are missing or not the ones compiled, or this machine is not the
            target.
        CheckpointError: the model's files do not hold what the artifact needs.
    """
    manifest = artifact.manifest
    assert manifest.weights.plan is not None, "see require_runnable"
    device = device_of(manifest.target)
    plan = WeightPlan.from_json(artifact.read_json(manifest.weights.plan))
    source = _source(artifact, model_dir)
    return [
        load_layer(plan, call.kind, call.vars, source, stem=call.stem, device=device)
        for call in step_calls(manifest.layers)
    ]


def _source(artifact: Artifact, model_dir: Path | None) -> WeightSource:
    manifest = artifact.manifest
    if manifest.weights.mode == "pack":
        files = [PackedFile(f.name, f.size, f.sha256) for f in manifest.weights.files]
        # the artifact's own check has hashed them already, as thoroughly as was asked for
        return PackedWeights.open(artifact.path / "weights", files, verify="header")
    indices = [layer.index for layer in manifest.layers]
    return Checkpoint.open(artifact.model_dir(model_dir), manifest.model.spec, indices)
