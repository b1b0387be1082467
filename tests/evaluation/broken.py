"""Artifacts made wrong on purpose, for measures to find out."""

from dataclasses import replace
from typing import Any

from dsa_compile.evaluation.subject import Subject
from dsa_compile.ir.calls import step_calls


def with_weight(subject: Subject, layer: int, key: str, change: Any) -> Subject:
    """The same artifact, one weight of one layer changed by a function."""
    position = 1 + layer  # the prologue comes first
    assert step_calls(subject.manifest.layers)[position].stem.endswith(str(layer))
    weights = list(subject.weights)
    weights[position] = {**weights[position], key: change(weights[position][key])}
    return replace(subject, weights=weights)


def with_spec(subject: Subject, **changes: Any) -> Subject:
    """The same artifact, said to be of another geometry."""
    manifest = subject.manifest
    model = replace(manifest.model, spec=replace(manifest.model.spec, **changes))
    artifact = replace(subject.artifact, manifest=replace(manifest, model=model))
    return replace(subject, artifact=artifact)
