"""Artifacts made wrong on purpose, for measures to find out."""

from dataclasses import replace
from typing import Any

from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact


def with_weight(loaded: LoadedArtifact, layer: int, key: str, change: Any) -> LoadedArtifact:
    """Artifact with one weight of one layer changed by a function."""
    (call,) = (call for call in loaded.manifest.layers if call.layer == layer)
    changed = {**loaded.weights[call.name], key: change(loaded.weights[call.name][key])}
    return replace(loaded, weights={**loaded.weights, call.name: changed})


def with_spec(loaded: LoadedArtifact, **changes: Any) -> LoadedArtifact:
    """Artifact whose manifest has another geometry."""
    manifest = loaded.manifest
    model = replace(manifest.model, spec=replace(manifest.model.spec, **changes))
    artifact = replace(loaded.artifact, manifest=replace(manifest, model=model))
    return replace(loaded, artifact=artifact)
