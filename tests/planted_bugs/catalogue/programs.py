"""Faults of what all passes use and start at: the editor, patterns, plans, the export."""

from dataclasses import replace
from typing import Any

import torch

from dsa_compile.weights.sharing import Home
from tests.planted_bugs.changes import (
    call_with,
    exported,
    replan,
)
from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import (
    Plant,
    Planting,
    result,
    within,
    wrap,
)

TENSOR = "fp8-kv-tensor"


# The editor.
def duplicates_by_nodes(whole: Any, edit: Any) -> None:
    """Keep one of calls whose nodes are the same, whatever their constants."""
    seen: dict[Any, Any] = {}
    for node in list(edit.graph.nodes):
        if node.op == "call_function" and not node.is_impure():
            first = seen.setdefault((node.target, str(node.all_input_nodes)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                edit.graph.erase_node(node)


def results_in(order: Any, names_too: bool) -> Plant:
    """A result that is to follow another stands where ``order(results, its place)`` puts it."""

    def returns(whole: Any, edit: Any, name: str, node: Any, after: str | None = None) -> None:
        new = name not in edit.region.outputs and after is not None
        whole(edit, name, node, after)
        if new:
            at = edit.region.outputs.index(name)
            output = edit.graph.output_node()
            output.args = (tuple(order(list(output.args[0]), at)),)
            if names_too:
                edit.region.outputs = tuple(order(list(edit.region.outputs), at))

    return wrap("ir.edit.Editor.returns", returns)


def at_the_end(items: list[Any], at: int) -> list[Any]:
    return [*items[:at], *items[at + 1 :], items[at]]


def one_before(items: list[Any], at: int) -> list[Any]:
    return [*items[: at - 1], items[at], items[at - 1], *items[at + 1 :]]


def kinds_share_weights(homes: Any, calls: Any, plan: Any) -> Any:
    first: dict[Any, Any] = {}
    return {
        call.name: {
            key: first.setdefault((call.kind, key), Home(call.name, key))
            for key in homes[call.name]
        }
        for call in calls
    }


def three_digits(whole: Any, value: Any) -> Any:
    number = isinstance(value, float) and abs(value) < float("inf")
    return float(f"{value:.3g}") if number else whole(value)


class _Kept(list[Any]):
    def copy(self) -> "_Kept":
        return self


def keep_arguments(_: None, call: Any, *args: Any) -> None:
    call._arguments = _Kept(call._arguments)


def of_the_base_alone(found: Any, architecture: Any, config: Any, *_: Any) -> Any:
    """RoPE's frequencies without YaRN."""
    width = config.qk_rope_head_dim
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    return replace(found, inv_freq=float(config.rope_parameters["rope_theta"]) ** -steps)


def layer_plan(change: Any) -> Plant:
    """The layers of the exported program's plan are others."""

    def changed(program: Any) -> None:
        plan = program.plans["model"]
        layers = tuple(change([call for call in plan.calls if call.layer is not None]))
        calls = (plan.calls[0], *layers, plan.calls[-1])
        program.plans = {**program.plans, "model": replace(plan, calls=calls)}

    return exported(changed)


def at_layer(index: int, **strings: str) -> Any:
    return call_with(lambda call: call.layer == index, **strings)


def reversed_operands(planting: Planting) -> None:
    planting.wrap("ir.match._first", lambda whole, tries: whole(reversed(list(tries))))


MODEL_PLAN = "frontend.build.model_plan"
PROGRAM = (
    Fault("sweep-drops-writes", "dead code takes writes of caches along",
          within("ir.edit.Editor.sweep", "torch.fx.Graph.eliminate_dead_code", lambda whole,
             graph: whole(graph, lambda node: node.op in ("placeholder", "output"))), "sweep",
          "program"),
    Fault("writing-stops-early", "a step without results leaves out the last layer's cache",
          result("ir.plan.Plan.writing", lambda found, *_: found[:-1]), "writing", "program",
          recipe="bf16", layers=(3,), hidden_by="max_num_batched_tokens=2048"),
    Fault("next-norm-of-last-but-one", "the layer before the last takes the final norm too",
          replan(MODEL_PLAN, "", at_layer(2, next_norm="model.norm")), "model_plan", "program",
          recipe="bf16", layers=(2,), exports=True),
    Fault("first-norm-of-the-second-layer", "the prologue opens with the second layer's norm",
          replan(MODEL_PLAN, "", call_with(lambda call: call.kind == "embed",
             next_norm="model.layers.1.input_layernorm")), "model_plan", "program", recipe="bf16",
          exports=True),
    Fault("layers-share-caches", "all layers write the rows of the first layer's caches",
          replan(MODEL_PLAN, "", lambda call: replace(call, caches=call.caches and "layer_000")),
          "model_plan", "program", recipe="fp8", exports=True),
    Fault("a-layer-skipped", "layer 1 is left out",
          layer_plan(lambda layers: [call for call in layers if call.layer != 1]), "plan",
          "program", model="three", layers=(1,)),
    Fault("weights-of-another-layer", "layer 2 has the weights of layer 1",
          layer_plan(lambda layers: map(at_layer(2, layer="model.layers.1"), layers)), "plan",
          "program", model="three", layers=(2,)),
    Fault("next-norm-of-one-layer", "layer 1 is followed by the model's norm",
          layer_plan(lambda layers: map(at_layer(1, next_norm="model.norm"), layers)), "plan",
          "program", model="three", layers=(1,)),
    Fault("reroute-skips-the-rest", "a rerouted value keeps its last user",
          within("ir.edit.Editor.reroute", "torch.fx.Node.replace_all_uses_with", lambda whole,
             old, new, delete_user_cb: whole(old, new,
             lambda user: delete_user_cb(user) and len(user.users) > 1)), "reroute", "program"),
    Fault("duplicates-by-nodes-alone", "calls that differ in a constant count as duplicates",
          wrap("ir.edit.Editor.merge_duplicates", duplicates_by_nodes), "merge_duplicates",
          "program", recipe="fp8"),
    Fault("results-appended", "a new result is named in the middle and stands at the end",
          results_in(at_the_end, names_too=False), "returns", "program"),
    Fault("control-results-before", "a new result comes before the one it is said to follow",
          results_in(one_before, names_too=True), where="program", recipe="fp8"),
    Fault("weights-of-first-of-kind", "calls of one kind share the weights of the first",
          result("weights.sharing.weight_homes", kinds_share_weights), "weight_homes", "program"),
    Fault("floats-in-three-digits", "numbers of a graph are written with three digits",
          wrap("ir.argument_json.encode", three_digits), "argument_json", "program"),
    Fault("control-arguments-in-place", "a call's arguments are kept between runs",
          result("ir.execution.BoundCall.__init__", keep_arguments), where="program"),
    Fault("an-indexer-promised-everywhere", "passes promise an indexer in every layer",
          wrap("passes.shared.each_indexer", lambda whole, program, region, count=1:
             (count if program.layer_kind(region) else 0)), "each_indexer", "program",
          recipe="bf16", model="glm"),
    Fault("control-swapped-order-first", "of operands that commute the swapped come first",
          reversed_operands, where="program", recipe=TENSOR),
    Fault("frequencies-without-yarn", "YaRN's interpolation of RoPE's frequencies is forgotten",
          result("frontend.reference.build_reference", of_the_base_alone), "build_reference",
          "program", exports=True),
)  # fmt: skip
