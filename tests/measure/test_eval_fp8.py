"""The measures on an artifact of recipe fp8, whose graphs choose, attend and hand on otherwise."""

import pytest
import torch

from benchmarks.plain_drafter import attention_scale
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.indexer_overlap import measure_overlap, references
from dsa_compile.measure.eval.key_selection import overrides_of, replace_ops
from dsa_compile.measure.eval.layer_error import ISOLATED, measure_layers
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.selections import CONTROLS
from tests.measure.broken import with_weight


@pytest.fixture(scope="module")
def fp8(model_dir) -> LoadedArtifact:
    out = model_dir.parent / "fp8"
    compile_model(model_dir, out, block_size=16, recipe="fp8")
    return LoadedArtifact.open(out)


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_change_what_is_selected_and_nothing_below_topk(fp8, ids, control):
    ours, theirs = fp8.runner(control).trace(ids), fp8.runner().trace(ids)
    topk = fp8.spec.index_topk
    assert torch.equal(ours.slots[0].sort().values[:topk], theirs.slots[0].sort().values[:topk])
    different = ours.slots[0].sort().values[topk:] != theirs.slots[0].sort().values[topk:]
    assert different.any()
    assert (ours.logits[topk:] - theirs.logits[topk:]).abs().max() > 0.1


def test_dense_attends_to_all(fp8, ids):
    slots = fp8.runner("dense").trace(ids).slots
    assert len(slots) == 3
    assert all(s[-1].sort().values.tolist() == list(range(len(ids))) for s in slots)


def test_interleaved_turns_keys_and_queries_and_nothing_else(fp8):
    overrides = overrides_of("interleaved")
    before = fp8.regions["moe.long"].graph
    after = replace_ops(fp8.regions, overrides)["moe.long"].graph
    pairs = list(zip(before.nodes, after.nodes, strict=True))
    changed = [old.target for old, new in pairs if old.target is not new.target]
    # one op for the keys and one for the queries, whichever way they are fused
    assert len(changed) == 2
    assert set(changed) < set(overrides)
    assert [n.target for n in before.nodes if n.target in overrides] == changed


def test_the_scale_of_attention_is_found(fp8, loaded):
    assert attention_scale(fp8) == attention_scale(loaded)


def test_layers_given_their_own_inputs_repeat_themselves(fp8, ids):
    runner = fp8.runner()
    trace = runner.trace(ids)
    for again, before in zip(runner.isolated(ids, trace), trace.hidden[1:], strict=True):
        assert torch.equal(again, before)


def test_a_layer_given_another_norm_quantises_that_one(fp8, ids):
    runner, short = fp8.runner(), ids[:16]  # nothing is selected: only projections read the norm
    trace = runner.trace(short)
    trace.normed[:] = [-normed for normed in trace.normed]
    for again, before in zip(runner.isolated(short, trace), trace.hidden[1:], strict=True):
        assert (again - before).norm() > 0.1 * before.norm()


def test_the_error_of_a_broken_layer_shows_in_it_alone(fp8, loaded, ids):
    key = "self_attn.o_proj.weight_e4m3"
    broken = with_weight(fp8, 1, key, lambda weight: weight.roll(1, 0))
    rows = measure_layers(broken.runner(), loaded.runner(), [0, 1, 2], [ids[:16]])
    alone = {row.layer: row.relative for row in rows if row.mode == ISOLATED}
    assert max(alone[0], alone[2]) < 0.08 < 0.15 < alone[1]


def test_the_indexer_overlaps_and_a_wrong_one_does_not(fp8):
    # Weights are random: the last key chosen is a twentieth of a standard deviation ahead of the
    # next, and FP8 moves a key in a row or so. Five sequences, since one scatters by half a point.
    generator = torch.Generator().manual_seed(1)
    ids = [[0, *torch.randint(2, 258, (99,), generator=generator).tolist()] for _ in range(5)]
    indexers = references(fp8)
    right = measure_overlap(fp8.runner(), indexers, {100: ids}, 16, "sparse")
    wrong = measure_overlap(fp8.runner("interleaved"), indexers, {100: ids}, 16, "interleaved")
    assert all(row.mean > 0.95 and row.deficit < 0.6 for row in right)
    assert all(row.mean < 0.8 and row.deficit > 2 for row in wrong)
