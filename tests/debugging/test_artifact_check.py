"""Graphs of an artifact against those that the passes make here."""

from torch import fx

from dsa_compile.debugging.recompiled_artifact import RecompiledArtifact
from dsa_compile.debugging.verify import artifact_check
from dsa_compile.debugging.verify.artifact_check import emission_problems


def test_numbers_are_compared_as_they_are(recompiled: RecompiledArtifact, monkeypatch) -> None:
    """Not as they are written: a writer of few digits would hide what it has lost."""
    artifact, final = recompiled.artifact, recompiled.replay.final
    assert list(emission_problems(artifact, final, recompiled.store, False)) == []
    whole = artifact_check.encode
    monkeypatch.setattr(
        artifact_check, "encode", lambda v: float(f"{v:.3g}") if isinstance(v, float) else whole(v)
    )
    name, region = next(
        (name, region) for name, region in final.regions.items() if scaled(region.graph)
    )
    changed = region.copy(name)
    node = scaled(changed.graph)[0]
    node.args = tuple(a * (1 + 1e-9) if isinstance(a, float) else a for a in node.args)
    monkeypatch.setitem(final.regions, name, changed)
    (problem,) = emission_problems(artifact, final, recompiled.store, False)
    assert problem.startswith(f"graph {name} is not what the passes make")


def scaled(graph: fx.Graph) -> list[fx.Node]:
    """Calls with a number among their operands."""
    return [node for node in graph.nodes if any(isinstance(a, float) and a for a in node.args)]
