import json

import pytest
import torch
from safetensors import safe_open

from benchmarks.plain_drafter import (
    DecoderLayer,
    Drafter,
    FinalNorm,
    Rows,
    attention_scale,
    load_mtp,
)
from benchmarks.plain_drafter import chain_matches as plain_matches
from dsa_compile.errors import UserError
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.constants import Rope
from dsa_compile.measure.eval.draft_chains import Chain, chains_of
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.mtp_acceptance import (
    GENERATED,
    TEXT,
    chain_matches,
    measure_acceptance,
)
from dsa_compile.weights.canonical import canonical_parameters
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import save_hub, tiny_config, tiny_model


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def drafts(loaded):
    """Of an artifact without draft plans, compiled once more with them."""
    return chains_of(loaded, 130)


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


@pytest.mark.parametrize("prompt_tokens", [3, 40])
def test_chains_are_those_of_the_plain_module(loaded, drafts, norm, ids, prompt_tokens):
    prompt, continuation = ids[:prompt_tokens], ids[prompt_tokens:]
    right, chains = chain_matches(drafts, prompt, continuation, 3)
    drafter = Drafter(loaded, len(ids), depth=3)
    theirs, states = plain_matches(loaded.runner(), drafter, norm, prompt, continuation)
    assert right.tolist() == theirs.tolist()
    ours = torch.stack([torch.cat([s["normed"] for s in chain.states]) for chain in chains], 1)
    torch.testing.assert_close(ours, states, rtol=0, atol=1e-4)


class Prophet:
    """Drafts the true tokens down to ``reach``, then a wrong one."""

    def __init__(self, truth, reach):
        self.truth, self.reach = truth, reach

    def chains(self, ids, ends, depth):
        assert list(ids) == self.truth
        made = {end: torch.zeros(depth, max(ids) + 2) for end in ends}
        for end, logits in made.items():
            for n in range(depth):
                logits[n, self.truth[end + 1 + n] + (n >= self.reach)] = 1.0
        return {end: Chain(logits, []) for end, logits in made.items()}


@pytest.mark.parametrize("reach", [0, 1, 2, 4])
def test_drafts_count_as_deep_as_they_are_right(ids, reach):
    prompt, continuation = ids[:20], ids[20:30]
    right, _ = chain_matches(Prophet(ids[:30], reach), prompt, continuation, 4)
    # a chain starts where the model gave its first token, the last ends at the last token
    assert right.shape == (4, 6)
    assert right.sum(1).tolist() == [6 if depth <= reach else 0 for depth in (1, 2, 3, 4)]


def test_acceptance_is_measured_on_text_and_on_continuations(loaded, drafts, ids):
    runner = loaded.runner()
    ticks = []
    rows = measure_acceptance(drafts, runner, [ids], [ids[:10], ids[:40]], 9, 2, ticks.append)
    assert [(r.source, r.depth, r.drafts) for r in rows] == [
        (TEXT, 1, 99), (GENERATED, 1, 14), (GENERATED, 2, 14),
    ]  # fmt: skip
    assert rows[1].accepted >= rows[2].accepted
    assert ticks[-1] == 1.0


def test_drafts_that_the_model_says_too_are_always_accepted(loaded, ids):
    logits = loaded.runner().trace(ids).logits

    class Echo:
        def along(self, _):
            return logits, {"logits": logits.roll(-1, 0)}

    (row,) = measure_acceptance(Echo(), loaded.runner(), [ids], [], 9, 1)
    assert (row.drafts, row.accepted, row.share) == (99, 99, 1.0)


def test_a_model_without_the_module_is_refused(tmp_path):
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1)
    save_hub(tiny_model(config), tmp_path / "model", fp8=False, mtp=False)
    compile_model(tmp_path / "model", tmp_path / "out", records=False)
    with pytest.raises(UserError, match="num_nextn_predict_layers"):
        chains_of(LoadedArtifact.open(tmp_path / "out"), 100)
