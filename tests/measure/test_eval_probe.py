from dataclasses import replace

import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.records import WeightsRecord
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.ir.plan import MODEL
from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.probe import TOKENS
from dsa_compile.measure.eval.selections import CONTROLS


def test_sequences_run_together_have_the_reference_models_logits(loaded, ids):
    hf = HfModel(loaded.model_dir, loaded.spec)
    # more than one step's worth, short and long ones, some of whose logits alone are wanted
    sequences = [ids[:7], ids, *[ids[: 60 + n] for n in range(50)]]
    tails = [3, 100, *[1] * 50]
    assert sum(map(len, sequences)) > TOKENS
    ours = list(loaded.runner().logits(sequences, tails))
    assert [len(logits) for logits in ours] == tails
    for index in (0, 1, 30, 51):
        (theirs,) = hf.logits([sequences[index]], [tails[index]])
        torch.testing.assert_close(ours[index], theirs, rtol=0, atol=1e-4)


def test_dense_attends_to_all_and_equals_a_model_that_keeps_all(loaded, ids):
    dense = loaded.runner("dense")
    (logits,) = dense.logits([ids])
    topk = loaded.spec.index_topk
    (sparse,) = loaded.runner().logits([ids])
    torch.testing.assert_close(logits[:topk], sparse[:topk], rtol=0, atol=1e-5)
    assert (logits[topk:] - sparse[topk:]).abs().max() > 0.1
    slots = dense.trace(ids).slots[0]
    assert slots[-1].sort().values.tolist() == list(range(len(ids)))


def test_dense_is_what_the_reference_gives_when_topk_covers_the_sequence(loaded, ids):
    hf = HfModel(loaded.model_dir, loaded.spec)
    for layer in hf._model.model.layers:
        layer.self_attn.indexer.index_topk = len(ids)
    (theirs,) = hf.logits([ids])
    (ours,) = loaded.runner("dense").logits([ids])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_change_what_is_selected_and_nothing_below_topk(loaded, ids, control):
    ours, theirs = loaded.runner(control).trace(ids), loaded.runner().trace(ids)
    topk = loaded.spec.index_topk
    torch.testing.assert_close(ours.logits[:topk], theirs.logits[:topk], rtol=0, atol=1e-5)
    assert (ours.logits[topk:] - theirs.logits[topk:]).abs().max() > 0.1
    different = ours.slots[0].sort().values[topk:] != theirs.slots[0].sort().values[topk:]
    assert different.any()


def test_a_trace_holds_every_layer(loaded, ids):
    for sequence in (ids, ids[:5]):  # the long and the short graphs
        trace = loaded.runner().trace(sequence)
        assert [tuple(h.shape) for h in trace.hidden] == [(len(sequence), 128)] * 4
        assert len(trace.slots) == 3
        (logits,) = loaded.runner().logits([sequence])
        assert torch.equal(trace.logits, logits)


def test_a_traced_sequence_goes_to_the_device_as_any_step_does(loaded, ids, monkeypatch):
    """Traces send what :meth:`ModelRunner.forward` does; one once ran on host tensors alone."""
    runner = loaded.runner()
    sent, upload = [], runner._upload
    monkeypatch.setattr(
        runner, "_upload", lambda arrays: sent.append(set(arrays)) or upload(arrays)
    )
    runner.trace(ids)
    (traced,) = sent
    list(runner.logits([ids]))
    assert sent == [traced, traced]


def test_layers_given_their_own_inputs_repeat_themselves(loaded, ids):
    runner = loaded.runner()
    trace = runner.trace(ids)
    for again, before in zip(runner.isolated(ids, trace), trace.hidden[1:], strict=True):
        assert torch.equal(again, before)


def test_a_sequence_beyond_the_models_limit_is_refused(loaded):
    with pytest.raises(UserError, match="513 tokens exceeds the limit of 512"):
        list(loaded.runner().logits([[5] * 513]))


def test_an_artifact_without_weights_is_refused(loaded, monkeypatch):
    manifest = loaded.manifest
    empty = replace(manifest, weights=WeightsRecord("none", None, None, ()))
    artifact = replace(loaded.artifact, manifest=empty)
    monkeypatch.setattr(Artifact, "open", lambda path, verify: artifact)
    with pytest.raises(ArtifactError, match="compiled with --weights none"):
        LoadedArtifact.open(artifact.path)


def test_some_of_the_layers_are_not_the_model(loaded):
    plan = loaded.manifest.plans[MODEL].first_layers(2)
    manifest = replace(loaded.manifest, plans={MODEL: plan})
    part = replace(loaded, artifact=replace(loaded.artifact, manifest=manifest))
    assert loaded.is_whole
    assert not part.is_whole
