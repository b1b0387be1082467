"""Programs run at every stage give what the exported one gives, and what the runtime gives."""

from pathlib import Path

import pytest
import torch

from dsa_compile.ir import plan
from dsa_compile.ir.passes import Numerics
from dsa_compile.measure.eval import loaded_artifact as evaluated
from dsa_compile.verify.comparison.agreement import same_bits
from dsa_compile.verify.execution.stages import Stage, run_stage
from dsa_compile.verify.inputs.prompt import Chunk, Part, Prompt
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

LENGTH = 27


def test_every_rewrite_keeps_the_logits(recompiled: RecompiledArtifact) -> None:
    prompt = recompiled.prompt(tokens=LENGTH)
    replay = recompiled.replay
    exported = run_stage(Stage.of(recompiled.exported, recompiled.store), prompt).logits()
    for position in range(0, replay.count + 1, 5):
        stage = Stage.of(replay.at(position), recompiled.store)
        logits = run_stage(stage, prompt).logits()
        name = replay.rewrite(position).pass_name if position else "export"
        torch.testing.assert_close(logits, exported, rtol=0, atol=1e-4, msg=name)
        exact = all(
            run.step.numerics is Numerics.BITWISE for run in replay.runs if run.first < position
        )
        assert not exact or same_bits(logits, exported), name


def test_the_last_stage_is_what_the_runtime_runs(
    recompiled: RecompiledArtifact, artifact: Path
) -> None:
    prompt = recompiled.prompt(tokens=LENGTH)
    stage = Stage.of(recompiled.replay.final, recompiled.store)
    ours = run_stage(stage, prompt)
    fresh = [chunk for chunk in ours.chunks if all(part.start == 0 for part in chunk.parts)]
    assert [stage.region("moe", c).name for c in fresh] == ["moe.prompt", "moe.long_prompt"]
    others = [chunk for chunk in ours.chunks if chunk not in fresh]
    assert [stage.region("moe", chunk).name for chunk in others] == [
        "moe.short" if chunk.longest <= stage.topk else "moe.long" for chunk in others
    ]
    assert others[0].longest <= stage.topk
    runner = evaluated.LoadedArtifact.open(artifact).runner()
    theirs = list(runner.logits(prompt.requests))
    mine = [ours.logits()[places] for places in prompt.places]
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_given_inputs_keep_an_error_in_its_layer(recompiled: RecompiledArtifact) -> None:
    prompt = recompiled.prompt(tokens=LENGTH)
    stage = Stage.of(recompiled.exported, recompiled.store)
    whole = run_stage(stage, prompt)
    for call in whole.calls[1].inputs:  # of the first layer
        call["hidden"] = call["hidden"] + 1.0
    made = run_stage(stage, prompt, given=whole)
    equal = [torch.equal(a, b) for a, b in zip(made.hidden(), whole.hidden(), strict=True)]
    assert equal == [True, False, True]


def test_a_prompt_is_cut_around_index_topk() -> None:
    prompt = Prompt.of(range(40), 16, 16)
    assert prompt.contexts == (8, 16, 37, 38, 39, 19, 40)
    batch = prompt.batch(prompt.chunks[2], flat=True)
    assert batch["slot_mapping"].tolist() == [101, *range(48, 64), *range(5)]
    assert batch["block_tables"].tolist() == [[6, -1, -1], [8, 3, 0]]  # 1, 4 and 7 are nobody's
    assert batch["cu_seqlens"].tolist() == [0, 1, 22]
    assert batch["context_lens"].tolist() == [6, 37]
    assert prompt.num_blocks == 10


def test_decodes_are_beside_another_request_and_padded_and_the_last_is_alone() -> None:
    prompt = Prompt.of(range(40), 16, 16)
    *beside, whole, alone = prompt.chunks
    assert all({part.request for part in chunk.parts} == {0, 1} for chunk in beside)
    assert [part.request for part in (*whole.parts, *alone.parts)] == [2, 0]
    assert [chunk.padding for chunk in prompt.chunks] == [0, 0, 0, 2, 2, 0, 0]
    assert [len(chunk.parts[0]) for chunk in (beside[-1], alone)] == [3, 1]
    batch = prompt.batch(beside[-1], flat=True)
    assert batch["slot_mapping"].tolist() == [103, 104, 105, 6, -1, -1]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4]  # several rows of one request
    assert batch["logit_rows"].tolist() == [0, 1, 2, 3, 4, 5]
    written = torch.cat([prompt.slots(request) for request in range(3)])
    assert 0 in written  # block 0 and row 0 belong to a request
    assert len(written.unique()) == len(prompt)
    rows = torch.cat([prompt.rows(chunk) for chunk in prompt.chunks])
    assert rows.tolist() == list(range(len(prompt)))


def test_a_decode_alone_leaves_out_more_keys_than_it_selects(
    recompiled: RecompiledArtifact,
) -> None:
    """Decode whose row sees more than twice as many keys as it selects."""
    topk = recompiled.exported.spec.index_topk
    prompt = recompiled.prompt()
    assert prompt.chunks[-1].size == 1
    assert prompt.contexts[-1] > 2 * topk + 1


@pytest.mark.parametrize("length", [2, 3, 4, 5, 17])
def test_a_short_prompt_is_cut_as_far_as_it_goes(length: int) -> None:
    prompt = Prompt.of(range(length), 16, 16)
    assert prompt.contexts[-1] == length
    rows = torch.cat([prompt.rows(chunk) for chunk in prompt.chunks])
    assert rows.tolist() == list(range(len(prompt)))


def test_programs_between_rewrites_are_those_of_a_limit(recompiled: RecompiledArtifact) -> None:
    """One run of a pass gives what a run for each number of rewrites gives, names too."""
    replay = recompiled.replay
    for run in replay.runs:
        stops = replay.between(run)
        assert len(stops) == max(len(run.sites), 1)
        for limit in {1, len(stops) // 2 + 1, len(stops)}:
            wanted, made = replay.within(run, limit), stops[limit - 1]
            assert made.weights == wanted.weights
            assert [*made.regions] == [*wanted.regions]
            for ours, theirs in zip(made.regions.values(), wanted.regions.values(), strict=True):
                assert str(ours.graph) == str(theirs.graph), (run.step.name, limit)
                assert ours.outputs == theirs.outputs


@pytest.mark.parametrize(
    ("start", "stop", "variant"),
    [(0, 16, "prompt"), (0, 17, "long_prompt"), (4, 16, "short"), (4, 17, "long")],
)
def test_which_region_a_step_runs_does_not_hang_on_the_table_that_is_judged(
    monkeypatch, start, stop, variant
):
    """With the compiler's own table wrong, checks would run, and blame, another region."""
    every = {f"moe.{name}" for name in plan.VARIANTS}
    monkeypatch.setattr(plan, "PROMPTS", {"prompt": "long", "long_prompt": "short"})
    monkeypatch.setattr(plan, "_TAKING", {"short": ("long",), "long": ("short",)})
    chunk = Chunk((Part(1, start, stop),))
    assert chunk.region("moe", every, 16) == f"moe.{variant}"
    assert chunk.region("moe", {"moe"}, 16) == "moe"
    split = {"moe.long", "moe.short"}
    assert chunk.region("moe", split, 16) == f"moe.{'short' if stop == 16 else 'long'}"
