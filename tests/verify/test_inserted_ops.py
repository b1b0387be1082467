"""Insertions by a rewrite: ops and the files that compute them, and weights that ranks share."""

from dataclasses import replace

from dsa_compile.facts.layout import Layout
from dsa_compile.verify.comparison.inserted_ops import inserted_ops
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


def brought(replay: Replay, name: str) -> str:
    index = next(i for i, run in enumerate(replay.runs) if run.step.name == name)
    return inserted_ops(replay.runs[index].before, replay.after(index))


def test_ops_are_named_with_their_files(recompiled: RecompiledArtifact) -> None:
    text = brought(recompiled.replay, "recognize_router")
    assert text == "inserts dsa.router (ops/moe.py: experts, place_experts too)"


def test_ops_are_named_that_are_called_with_other_constants(recompiled: RecompiledArtifact) -> None:
    """The router takes the shared expert in: that is another way through an op that was there."""
    text = brought(recompiled.replay, "merge_shared_expert")
    expected = "calls dsa.router (ops/moe.py: experts, place_experts too) with other arguments"
    assert text == expected
    assert "other arguments" not in brought(recompiled.replay, "fuse_add_norm")


def test_weights_are_named_that_a_rewrite_cuts(recompiled: RecompiledArtifact) -> None:
    exported = recompiled.exported
    cut = Replay(exported.fork(replace(exported.config, layout=Layout(tp=2))))
    text = brought(cut, "place")
    inserted, cut_weights = text.split("; cuts ")
    assert inserted.startswith("inserts ")
    assert "dsa.all_reduce (ops/collectives.py" in inserted
    assert "self_attn.o_proj.weight, self_attn.q_b_proj.weight" in cut_weights
    assert text.endswith("(weights/ranks.py, weights/windows.py)")
    assert "cuts" not in brought(cut, "recognize_router")
