"""Plans whose calls have what is another's or are left out, and rows that nobody selects."""

from copy import copy
from dataclasses import replace

import pytest

from dsa_compile.ir.plan import MODEL, Plan
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.verify.checks import plan_check
from dsa_compile.verify.checks.hazard_check import illegal
from dsa_compile.verify.checks.plan_check import plan_problems
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights.sharing import Home


def with_plan(program: Program, plan: Plan) -> Program:
    return replace(program, plans={**program.plans, MODEL: plan})


def test_a_right_plan_has_none(recompiled: RecompiledArtifact) -> None:
    assert list(plan_problems(recompiled.replay.final)) == []


def test_two_layers_with_the_caches_of_one(recompiled: RecompiledArtifact) -> None:
    program = recompiled.replay.final
    plan = program.plans[MODEL]
    first, second, *_ = plan.layers
    calls = [replace(c, caches=first.caches) if c is second else c for c in plan.calls]
    (problem,) = plan_problems(with_plan(program, replace(plan, calls=tuple(calls))))
    assert problem == (
        f"plan model: {second.name} writes its rows to the caches of {first.caches}, "
        f"which layer {first.layer} has"
    )


def test_a_layer_without_caches(recompiled: RecompiledArtifact) -> None:
    program = recompiled.replay.final
    plan = program.plans[MODEL]
    last = plan.layers[-1]
    calls = [replace(c, caches=None) if c is last else c for c in plan.calls]
    problems = list(plan_problems(with_plan(program, replace(plan, calls=tuple(calls)))))
    assert f"plan model: {last.name} writes caches and has none" in problems
    assert any(f"leaves out {last.name}" in problem for problem in problems)


def test_a_layer_with_other_caches_in_another_plan(recompiled: RecompiledArtifact) -> None:
    program = recompiled.replay.final
    plan = program.plans[MODEL]
    again = replace(plan, calls=tuple(replace(c, name=f"{c.name}_again") for c in plan.calls))
    both = {**program.plans, "again": again}
    assert list(plan_problems(replace(program, plans=both))) == []
    last = plan.layers[-1]
    calls = [
        replace(c, caches="deeper") if c.layer is not None and c.layer == last.layer else c
        for c in again.calls
    ]
    both["again"] = replace(again, calls=tuple(calls))
    (problem,) = plan_problems(replace(program, plans=both))
    assert problem == (
        f"layer {last.layer} has the caches of deeper in {last.name}_again and those of "
        f"{last.caches} in {last.name}: what one writes the other does not read"
    )


def test_a_weight_loaded_for_another(
    recompiled: RecompiledArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = recompiled.replay.final
    first, second = (call.name for call in program.plans[MODEL].layers[:2])
    whole = plan_check.weight_homes
    key = "next_norm.weight"

    def shared(*args: object) -> dict[str, dict[str, Home]]:
        homes = whole(*args)  # type: ignore[arg-type]
        return {**homes, second: {**homes[second], key: Home(first, key)}}

    monkeypatch.setattr(plan_check, "weight_homes", shared)
    (problem,) = plan_problems(program)
    assert problem == (
        f"weight {key} of {second} is loaded as {key} of {first}, which is made otherwise"
    )


def test_rows_that_are_not_selected(recompiled: RecompiledArtifact) -> None:
    replay = copy(recompiled.replay)
    replay.final = replay.final.fork(replay.final.config)
    head = replay.final.regions["head"]
    assert list(illegal(replay)) == []
    (rows,) = (n for n in head.inputs_of(Role.BATCH) if n.meta["key"] == "logit_rows")
    (chosen,) = rows.users
    whole = next(node for node in chosen.all_input_nodes if node is not rows)
    world = replay.final.world
    chosen.replace_all_uses_with(whole)
    for node in head.graph.nodes:
        if node.op == "call_function":
            node.meta["val"] = world.evaluate(node.target, node.args, node.kwargs)
    (hazard,) = illegal(replay)
    assert hazard.problem == "head: logits are of T rows, not of the N wanted"
    assert hazard.pass_name == replay.runs[-1].step.name
