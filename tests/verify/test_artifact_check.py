"""Graphs of an artifact against those that the passes make here."""

from pathlib import Path

import pytest
import torch
from torch import fx

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.verify.checks import artifact_check
from dsa_compile.verify.checks.artifact_check import emission_problems
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


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


@pytest.mark.parametrize("last", ["functionalize", "absorb_mla"])
def test_an_artifact_that_was_stopped_early(model_dir: Path, tmp_path: Path, last: str) -> None:
    """Such an artifact has ops that no artifact is run with."""
    path = tmp_path / "artifact"
    compile_model(model_dir, path, block_size=16, stop_after=last)
    mine = RecompiledArtifact.open(path)
    assert mine.problems() == []
    region = next(iter(mine.replay.final.regions.values()))
    node = region.graph.find_nodes(op="output")[0].all_input_nodes[0]
    with region.graph.inserting_after(node):
        region.graph.call_function(torch.ops.aten.neg.default, (node,))
    (problem,) = mine.problems()
    assert problem.startswith(f"graph {region.name} is not what the passes make")


def scaled(graph: fx.Graph) -> list[fx.Node]:
    """Calls with a number among their operands."""
    return [node for node in graph.nodes if any(isinstance(a, float) and a for a in node.args)]
