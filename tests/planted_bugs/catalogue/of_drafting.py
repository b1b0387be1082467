"""Faults of drafting: its plans, how its prologue is traced, passes over it, and the drafter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tests.planted_bugs.changes import call_with, exported, given, input_of, replan, scaled
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import Plant, inserting, result, within, wrap

aten = torch.ops.aten
MTP = "model.layers.3"
PLANS, ROWS = "frontend.build.program_plans", "runtime.execution.draft_rows."
OPTIONS = (("draft", "mtp"),)
THREE = {"model": "three-mtp", "options": OPTIONS}
EXPORTED = {**THREE, "exports": True}
TRAINED = {"model": "trained", "options": OPTIONS}
DRAFTER = {"where": "runtime", **TRAINED}


def calls_given(plan: str, name: str, **strings: str) -> Plant:
    """A call of a plan is given other weights by name."""
    return replan(PLANS, plan, call_with(lambda call: call.name == name, **strings))


def retraced(change: Callable[[Any], None]) -> Plant:
    """The prologue of a draft is traced otherwise."""
    return exported(lambda program: change(program.regions["draft"]))


def taken(region: Any, key: str) -> fx.Node:
    node: fx.Node = next(node for node in region.inputs() if node.meta["key"] == key)
    return node


def raw_states(region: Any) -> None:
    normed = [n for n in region.graph.nodes if n.meta.get("path") == "norm"][-1]
    normed.replace_all_uses_with(taken(region, "hidden"))


def joined_backwards(region: Any) -> None:
    """State first; RoPE's tables are made with ``cat``, too."""
    width = taken(region, "eh_proj.weight").meta["val"].shape[1]
    joins = (n for n in region.graph.nodes if n.target is aten.cat.default)
    (joined,) = (n for n in joins if n.meta["val"].shape[-1] == width)
    parts, *rest = joined.args
    joined.args = (parts[::-1], *rest)


def positions_twice_as_far(region: Any) -> None:
    """Keys and queries are rotated alike, so positions that are all one ahead change nothing."""
    positions = taken(region, "positions")
    with region.graph.inserting_after(positions):
        far = region.graph.call_function(aten.mul.Tensor, (positions, 2))
    far.meta.update(positions.meta, role=None)
    positions.replace_all_uses_with(far, delete_user_cb=lambda user: user is not far)


def norms_exchanged(program: Any) -> None:
    weights = program.weights
    one, other = (next(k for k in weights.entries("draft") if n in k) for n in ("enorm", "hnorm"))
    a, b = weights.remove("draft", one), weights.remove("draft", other)
    weights.define("draft", one, b)
    weights.define("draft", other, a)


def without_the_norm(whole: Any, module: Any, *given: Any) -> Any:
    weight = module.norm.weight
    module.__dict__["norm"] = lambda hidden: hidden * weight.mean()
    try:
        return whole(module, *given)
    finally:
        del module.__dict__["norm"]


def token_itself(found: Any, inputs: Any, *_: Any) -> Any:
    following, batch = found["following"].copy(), inputs.batch
    known = following != -1
    known[batch.cu_seqlens[1:] - 1] = False
    following[known] = batch.input_ids[known]
    return {**found, "following": following}


def by_order(whole: Any, self: Any, rows: Any, *given: Any) -> None:
    places = torch.arange(len(rows.rows), device=rows.rows.device)
    whole(self, replace(rows, rows=places), *given)


def by_own_names(whole: Any, manifest: Any, regions: Any, plan: Any, *given: Any) -> Any:
    own = tuple(replace(call, caches=call.caches and call.name) for call in plan.calls)
    return whole(manifest, regions, replace(plan, calls=own), *given)


FAULTS = (
    Fault("raw-states-before-a-draft", "raw states go into the first draft",
          retraced(raw_states), "draft", "program", **EXPORTED, layers=("draft",)),
    Fault("norm-of-the-head-before-a-draft", "the head's norm stands before the first draft",
          calls_given("draft", "draft", norm=f"{MTP}.shared_head.norm"), "draft", "program",
          **EXPORTED, layers=("draft",)),
    Fault("norm-of-the-model-before-a-deeper-draft", "the model's norm before a deeper draft",
          calls_given("deeper_draft", "deeper_draft", norm="model.norm"), "deeper_draft", "program",
          **EXPORTED, layers=("deeper_draft",)),
    Fault("norm-of-the-model-before-the-head", "the model's norm stands before the draft's head",
          calls_given("draft", "draft_head", norm="model.norm"), "draft_head", "program",
          **EXPORTED, layers=("draft_head",)),
    Fault("draft-weights-of-another-layer", "the draft's layer has the weights of another",
          calls_given("draft", "draft_layer", layer="model.layers.2"), "3", "program", **EXPORTED,
          layers=(3,)),
    Fault("draft-norms-exchanged", "the norms of token and state are exchanged",
          exported(norms_exchanged), "draft", "program", **EXPORTED, layers=("draft",)),
    Fault("draft-joined-backwards", "state and token are joined backwards",
          retraced(joined_backwards), "draft", "program", **EXPORTED, layers=("draft",)),
    Fault("draft-positions-twice-as-far", "positions of drafts are twice as far apart",
          retraced(positions_twice_as_far), "3", "program", **EXPORTED, layers=(3,)),
    Fault("draft-state-not-normed", "a draft's state goes in without the final norm",
          wrap("frontend.modules.Draft.forward", without_the_norm), "Draft", "program", **TRAINED,
          exports=True),
    Fault("draft-layer-ends-in-the-models-norm", "behind the draft layer: the model's final norm",
          calls_given("draft", "draft_layer", next_norm="model.norm"), "program_plans", "program",
          **TRAINED, recipe="bf16", exports=True),
    Fault("deeper-drafts-own-caches", "deeper drafts read caches of their own",
          replan(PLANS, "deeper_draft", lambda call: replace(call,
             caches=call.caches and "deeper_draft_layer")), "program_plans", "program", **TRAINED,
          recipe="bf16", exports=True),
    Fault("eps-of-the-drafts-norms", "eps of the draft's norms",
          inserting("recognize_rms_norm", "dsa.rms_norm", scaled(2, 1e4), region="draft"),
          "recognize_rms_norm", **THREE),
    Fault("the-position-for-the-token", "the position is embedded in place of the token",
          inserting("recognize_embedding", "dsa.embedding", given(0, input_of("positions")),
             region="draft"), "recognize_embedding", **THREE),
    Fault("the-token-for-the-position", "the token is taken for the position",
          inserting("recognize_rope_tables", "dsa.rope_tables", given(0, input_of("input_ids")),
             region="draft"), "recognize_rope_tables", **THREE),
    Fault("drafted-from-the-first-row", "the next draft is made from a step's first row",
          result(ROWS + "DraftedRows.settle_known", lambda found, rows, *_: replace(found,
             ends=rows.places[:, 0])), "draft_rows", **DRAFTER, recipe="bf16"),
    Fault("following-is-the-token-itself", "along a prompt the draft layer takes each token",
          result("runtime.execution.draft_inputs.ragged_inputs", token_itself), "draft_inputs",
          **DRAFTER),
    Fault("caches-by-the-calls-own-name", "a call is given the caches of its own name",
          wrap("runtime.execution.bound_calls.bound_calls", by_own_names), "bound_calls",
          **DRAFTER),
    Fault("deeper-drafts-one-too-far", "a deeper draft's row is one position too far",
          wrap(ROWS + "deeper_rows", lambda whole, rows, *given: whole(replace(rows,
             start=rows.start + 1), *given)), "draft_rows", **DRAFTER, hidden_by="draft=none"),
    Fault("accepted-behind-a-wrong-draft", "drafts that are right count behind a wrong one",
          within(ROWS + "count_right", "torch.Tensor.cumprod", lambda whole, right, dim: right),
          "draft_rows", **DRAFTER, hidden_by="draft=none"),
    Fault("states-kept-by-order", "states of drafts are kept by a request's place in the step",
          wrap("runtime.execution.drafter.Drafter.begin", by_order), "drafter", **DRAFTER),
)  # fmt: skip
