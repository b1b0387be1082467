"""Faults planted into drafting: each makes drafts worse, or tokens wrong, and is found by it."""

from dataclasses import replace

import pytest
import torch

from dsa_compile.runtime import SamplingParams
from dsa_compile.runtime.execution import draft_rows, model_runner
from dsa_compile.runtime.execution.drafter import Drafter

from .walks import (
    DEPTH,
    GENERATED,
    Recording,
    made_again,
    prompts_of,
    record,
    walk_by_engine,
    walk_by_measure,
)

FAULTS = {}


def with_slots(run, slots, drafter, plan, values, variant):
    """Run a draft plan that writes its rows to other slots; None for its own."""
    own = values["slot_mapping"]
    values["slot_mapping"] = own if slots is None else slots
    run(drafter, plan, values, variant)
    values["slot_mapping"] = own


def fault(plant):
    FAULTS[plant.__name__] = plant
    return plant


@fault
def raw_states_between_drafts(patch, runner):
    """Hand on what the draft layer returns in place of its norm."""
    run = Drafter._run

    def raw(self, plan, values, variant):
        run(self, plan, values, variant)
        values["normed"] = values["hidden"]

    patch.setattr(Drafter, "_run", raw)


@fault
def tokens_not_shifted(patch, runner):
    """Give a draft the token at the position of its state."""
    run = Drafter.begin

    def unshifted(self, rows, values, variant, settled):
        run(self, rows, values, variant, replace(settled, following=values["input_ids"]))

    patch.setattr(Drafter, "begin", unshifted)


@fault
def prompt_shifted_within_chunks_alone(patch, runner):
    """Forget the token behind a chunk."""
    ragged = model_runner.ragged_inputs

    def within(inputs, *args):
        return ragged(replace(inputs, next_ids=[-1] * len(inputs.next_ids)), *args)

    patch.setattr(model_runner, "ragged_inputs", within)


@fault
def stale_index_keys(patch, runner):
    """Read the draft layer's index keys as they were when the request began."""
    run = Drafter._run
    kept = {}

    def stale(self, plan, values, variant):
        keys = runner.caches["draft_layer"]["index_cache"]
        if "keys" not in kept:
            run(self, plan, values, variant)
            kept["keys"] = keys.clone()
            return
        keys.copy_(kept["keys"])
        run(self, plan, values, variant)

    patch.setattr(Drafter, "_run", stale)


@fault
def one_cache_row_too_few(patch, runner):
    """Leave out the row of a step's last token."""
    run = Drafter._run

    def fewer(self, plan, values, variant):
        slots = values["slot_mapping"].clone()
        slots[-1] = -1
        with_slots(run, slots if len(slots) > 1 else None, self, plan, values, variant)

    patch.setattr(Drafter, "_run", fewer)


@fault
def deeper_drafts_one_position_ahead(patch, runner):
    """Count a deeper draft's position from its token, not from its state."""
    deeper = draft_rows.deeper_rows

    def ahead(*args):
        made = deeper(*args)
        return {**made, "positions": made["positions"] + 1}

    patch.setattr(draft_rows, "deeper_rows", ahead)


@fault
def another_head(patch, runner):
    """Round the draft's head to e4m3, as where one of another dtype was loaded."""
    weights = runner._weights
    (key,) = (key for key in weights["draft_head"] if "lm_head" in key)
    rough = weights["draft_head"][key].to(torch.float8_e4m3fn).float()
    heads = {n: {**weights[n], key: rough} for n in ("draft_head", "deeper_draft_head")}
    patch.setattr(runner, "_weights", {**weights, **heads})
    runner._drafter = made_again(runner, Recording)


@fault
def one_token_too_many(patch, runner):
    """Keep the token behind the first wrong draft as well."""
    count = draft_rows.count_right

    def too_far(sampled, drafts, max_new):
        return (count(sampled, drafts, max_new) + 1).minimum(max_new)

    patch.setattr(draft_rows, "count_right", too_far)


@fault
def states_of_rejected_rows(patch, runner):
    """Begin the next drafts at the last row of a step, whether it was right or not."""
    begin = Drafter.begin

    def last(self, rows, values, variant, settled):
        places = rows.places.gather(1, rows.max_new[:, None] - 1)[:, 0]
        begin(self, rows, values, variant, replace(settled, ends=places))

    patch.setattr(Drafter, "begin", last)


@fault
def rows_of_drafts_not_rewritten(patch, runner):
    """Keep the rows that deeper drafts wrote, where the model's states should replace them."""
    run = Drafter._run

    def keeping(self, plan, values, variant):
        slots = values["slot_mapping"]
        if plan == "draft" and 1 < len(slots) <= DEPTH + 1:
            slots = slots.clone()
            slots[1:DEPTH] = -1
        with_slots(run, slots, self, plan, values, variant)

    patch.setattr(Drafter, "_run", keeping)


@pytest.fixture(scope="module")
def right(make_engine, loaded, text):
    """Acceptance by the measure along the tokens that an engine without drafts gives."""
    params = SamplingParams(max_tokens=GENERATED, temperature=0.0, ignore_eos=True)
    prompts = prompts_of(text)
    outputs = make_engine(0).generate(prompts, params)
    pairs = zip(prompts, outputs, strict=True)
    return [walk_by_measure(loaded, prompt, output.token_ids) for prompt, output in pairs]


def agrees(engine, text, right):
    pairs = zip(prompts_of(text), right, strict=True)
    return all(walk_by_engine(engine, prompt).agrees(wanted) for prompt, wanted in pairs)


def test_without_a_fault_everything_agrees(make_engine, text, right):
    assert agrees(record(make_engine(DEPTH, "mtp", max_num_batched_tokens=64)), text, right)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(make_engine, text, right, monkeypatch, name):
    engine = record(make_engine(DEPTH, "mtp", max_num_batched_tokens=64))
    FAULTS[name](monkeypatch, engine._runner)
    assert not agrees(engine, text, right)
