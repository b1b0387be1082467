"""Plans cut down to few layers, and programs with small blocks, as bisect serves requests by."""

from dataclasses import replace

from dsa_compile.ir.plan import MODEL
from dsa_compile.ir.region import Role
from dsa_compile.verify.bisect.few_layers import first_of_each_kind, first_with_caches
from dsa_compile.verify.bisect.runtime_answers import Answers
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact


def test_the_second_layer_is_kept_with_the_first(recompiled: RecompiledArtifact) -> None:
    program = recompiled.replay.final
    plan = program.plans[MODEL]
    kinds = [call.kind for call in plan.layers]
    few = [call.kind for call in first_of_each_kind(plan).layers]
    assert few == list(dict.fromkeys(kinds))
    kept = first_with_caches(plan, program)
    assert [call.name for call in kept.layers] == [call.name for call in plan.layers[:2]]
    assert [c.name for c in kept.calls if c.layer is None] == [
        c.name for c in plan.calls if c.layer is None
    ]


def test_a_kind_with_caches_of_its_own_form_is_kept(recompiled: RecompiledArtifact) -> None:
    program = recompiled.replay.final
    plan = program.plans[MODEL]
    last = plan.layers[-1]
    regions = {}
    for name, region in program.regions.items():
        regions[name] = region.copy(name)
        for node in regions[name].inputs_of(Role.CACHE) if region.kind == last.kind else ():
            node.meta["key"] = f"{node.meta['key']}_of_its_own"
    kept = first_with_caches(plan, replace(program, regions=regions))
    assert {call.kind for call in kept.layers} == {call.kind for call in plan.layers}


def test_answers_with_small_blocks_are_those_of_the_same_layers(
    recompiled: RecompiledArtifact,
) -> None:
    answers = Answers(recompiled, exact=True)
    small = answers.of_small_blocks()
    assert small.block_size == min(16, answers.block_size)
    whole = answers._cut(lambda plan: first_with_caches(plan, answers._program))
    prompts = [tuple(range(3, 3 + count)) for count in (5, 40)]
    for mine, other in zip(small.plain(prompts), whole.plain(prompts), strict=True):
        assert mine.difference(other, small.limit) == ""
