import json
import shutil

import pytest
import torch
from safetensors import safe_open

from dsa_compile.errors import CheckpointError
from dsa_compile.measure.eval.constants import Rope, attention_scale
from dsa_compile.measure.eval.decoder_layer import DecoderLayer, Rows
from dsa_compile.measure.eval.mtp_acceptance import (
    GENERATED,
    TEXT,
    Drafter,
    FinalNorm,
    chain_matches,
    measure_acceptance,
)
from dsa_compile.measure.eval.mtp_weights import load_mtp
from dsa_compile.weights.canonical import canonical_parameters
from dsa_compile.weights.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def norm(loaded):
    return FinalNorm(loaded)


def test_the_plain_layer_equals_the_compiled_one(loaded, ids):
    checkpoint = Checkpoint.open(loaded.model_dir, loaded.spec, range(3))
    weights = {}
    for name in canonical_parameters(loaded.spec, [2]):
        if name.startswith("model.layers.2."):
            out = torch.empty(checkpoint.shape(name))
            checkpoint.read_into(name, out)
            weights[name.removeprefix("model.layers.2.")] = out
    scale = attention_scale(loaded)
    layer = DecoderLayer(loaded.spec, weights, Rope.of(loaded), scale, rows=len(ids))
    trace = loaded.runner().trace(ids)
    ours, _ = layer(trace.hidden[2], Rows.sequence(len(ids)))
    torch.testing.assert_close(ours, trace.hidden[3], rtol=0, atol=1e-5)


def test_weights_are_those_under_the_modules_keys(loaded):
    weights = load_mtp(loaded.model_dir, loaded.spec, torch.bfloat16)
    assert weights["eh_proj.weight"].dtype == torch.bfloat16
    assert weights["mlp.gate.e_score_correction_bias"].dtype == torch.float32
    index = json.loads((loaded.model_dir / "model.safetensors.index.json").read_text())
    for name in ("eh_proj.weight", "shared_head.head.weight", "self_attn.o_proj.weight"):
        key = f"model.layers.3.{name}"
        with safe_open(loaded.model_dir / index["weight_map"][key], "pt") as file:
            assert torch.equal(weights[name], file.get_tensor(key))


def test_a_deeper_draft_is_the_drafters_own_continuation(loaded, norm, ids):
    """Feeding states and drafts back must equal one longer sequence that holds them."""
    states = norm(loaded.runner().trace(ids).hidden[-1])[:-1]
    tokens = torch.tensor(ids[1:])
    drafter = Drafter(loaded, len(ids), depth=3)
    first, after = drafter.first(states, tokens)
    starts = torch.tensor([3, 20, 70, 98])
    chain = [(first[starts], after[starts])]
    for depth in (2, 3):
        drafts, deeper = drafter.deeper(starts, len(tokens), depth, chain[-1][1], chain[-1][0])
        chain.append((drafts, deeper))
    for number, start in enumerate(starts.tolist()):
        longer_states = [states[: start + 1], *(c[1][number : number + 1] for c in chain[:2])]
        longer_tokens = [tokens[: start + 1], *(c[0][number : number + 1] for c in chain[:2])]
        fresh = Drafter(loaded, len(ids) + 2, depth=1)
        drafts, after = fresh.first(torch.cat(longer_states), torch.cat(longer_tokens))
        assert drafts[-3:].tolist() == [c[0][number].item() for c in chain]
        torch.testing.assert_close(after[-1], chain[2][1][number], rtol=0, atol=1e-4)


class Prophet:
    """Drafts the true tokens down to ``reach``, then a wrong one."""

    def __init__(self, truth, reach, depth=4):
        self.truth, self.reach, self.depth = torch.tensor(truth), reach, depth

    def first(self, states, tokens):
        assert torch.equal(tokens, self.truth[1:])
        following = torch.cat([self.truth[2:], self.truth[:1]])
        return following + (self.reach < 1), states

    def deeper(self, starts, length, depth, states, drafts):
        assert length == len(self.truth) - 1
        return self.truth[starts + 1 + depth] + (self.reach < depth), states


@pytest.mark.parametrize("reach", [0, 1, 2, 4])
def test_drafts_count_as_deep_as_they_are_right(loaded, norm, ids, reach):
    prompt, continuation = ids[:20], ids[20:30]
    drafter = Prophet(ids[:30], reach)
    right, _ = chain_matches(loaded.runner(), drafter, norm, prompt, continuation)
    # a chain starts where the model gave its first token, the last ends at the last token
    assert right.shape == (4, 6)
    assert right.sum(1).tolist() == [6 if depth <= reach else 0 for depth in (1, 2, 3, 4)]


def test_acceptance_is_measured_on_text_and_on_continuations(loaded, norm, ids):
    runner = loaded.runner()
    drafter = Drafter(loaded, 120, depth=2)
    ticks = []
    rows = measure_acceptance(runner, drafter, norm, [ids], [ids[:10], ids[:40]], 9, ticks.append)
    assert [(r.source, r.depth, r.drafts) for r in rows] == [
        (TEXT, 1, 99), (GENERATED, 1, 14), (GENERATED, 2, 14),
    ]  # fmt: skip
    assert rows[1].accepted >= rows[2].accepted
    assert ticks[-1] == 1.0


def test_a_drafter_that_says_what_the_model_says_is_always_accepted(loaded, norm, ids):
    runner = loaded.runner()
    greedy = runner.trace(ids).logits.argmax(-1)

    class Echo(Prophet):
        def first(self, states, tokens):
            return greedy[1:], states

    (row,) = measure_acceptance(runner, Echo(ids, 0), norm, [ids], [], 9)
    assert (row.drafts, row.accepted, row.share) == (99, 99, 1.0)


def test_a_model_without_the_module_is_refused(loaded, model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.layers.3.eh_proj.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lack 'model.layers.3.eh_proj.weight'"):
        load_mtp(tmp_path / "model", loaded.spec, torch.float32)
