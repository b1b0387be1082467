"""Options of the runtime: requests served with them, compared with requests that run alone.

What an option may change is nothing but rounding, whose size is measured: see
:class:`~dsa_compile.verify.bisect.runtime_answers.Answers`.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, TypeAlias

from dsa_compile.ir.plan import DRAFT
from dsa_compile.verify.bisect.runtime_answers import Answers
from dsa_compile.verify.bisect.runtime_scenes import (
    OVERLAP,
    Scene,
    crowded_scenes,
    drafted_scenes,
    looked_up_scenes,
    mixed_prompts,
    prefix_scenes,
    scenes,
)
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.execution.collecting import new_objects_alone
from dsa_compile.verify.inputs.prompt import random_tokens
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

ANY = "any options"
"""The name of what is wrong with all options switched off, too."""

OptionCheck: TypeAlias = Callable[[], tuple[str, str] | None]
"""Check that gives an option with which requests are answered wrongly, and how."""

_MEASURED = 24  # tokens of the prompt that shows what rounding does


def wrong_option(recompiled: RecompiledArtifact) -> tuple[str, str] | None:
    """The first option with which requests are answered wrongly, and what is wrong.

    Args:
        recompiled: as for :func:`option_checks`.
    """
    found = (check() for check in option_checks(recompiled))
    return next((wrong for wrong in found if wrong is not None), None)


def option_checks(recompiled: RecompiledArtifact) -> list[OptionCheck]:
    """Checks of options, each good for what is right by those before it.

    The artifact's graphs run in exact arithmetic on the CPU, whatever they were compiled for.

    Args:
        recompiled: of a model small enough for that.
    """
    answers = Answers(recompiled, exact=True)
    few = answers.of_few_layers()
    return [partial(_guarded, check) for check in _scene_checks(answers, few, False)]


def wrong_engine(recompiled: RecompiledArtifact) -> tuple[str, str] | None:
    """Option with which the engine, as loaded here, answers unlike the finished graphs, and how.

    Whatever all options have in common shows here, from how caches are made to what is bound: the
    finished graphs run without the runtime. Ranks, of which there are several, choose tokens of
    steps that are launched ahead.

    Args:
        recompiled: an artifact for this machine that is what its passes make.
    """
    if recompiled.artifact.manifest.compile.layout.world == 1:
        problem = _loaded_problem(recompiled, {})
        return (ANY, problem) if problem else None
    options = {"max_num_seqs": 2, "async_scheduling": True}
    problem = _loaded_problem(recompiled, options)
    if not problem:
        return None
    without = _loaded_problem(recompiled, options | {"async_scheduling": False})
    return (ANY, without) if without else (OVERLAP, f"with it, and not without: {problem}")


def _loaded_problem(recompiled: RecompiledArtifact, options: dict[str, Any]) -> str:
    """Problem of plain answers of an engine with some options; empty if nothing is wrong."""
    answers = Answers(recompiled, exact=False, options=options)
    layout = recompiled.artifact.manifest.compile.layout
    lanes, vocab_size = layout.dp, recompiled.exported.spec.vocab_size
    # of several lanes each has two requests, and no two lanes the same numbers of blocks
    block = recompiled.artifact.manifest.block_size
    longer = {0: block, 2 * lanes - 1: block} if lanes > 1 else {}
    prompts = [
        random_tokens(_MEASURED + n + longer.get(n, 0), vocab_size, seed=9 + n)
        for n in range(2 * lanes if lanes > 1 else 1)
    ]

    def problem() -> str:
        found = answers.measure(prompts, together=lanes > 1)
        if found or layout.world == 1:
            return found
        return answers.ahead_problem(lanes)

    try:
        found = _guarded(lambda: (ANY, problem()))
    finally:
        answers.close()
    return "" if found is None else found[1]


def wrong_option_on_device(recompiled: RecompiledArtifact) -> tuple[str, str] | None:
    """First wrong option as :func:`wrong_option`, with the artifact's kernels and CUDA graphs.

    Tokens are held to those of a plain engine as far as the recipe's rounding cannot change them.

    Args:
        recompiled: an artifact for the GPU here, of a small model.
    """
    answers = Answers(recompiled, exact=False)
    found = map(_guarded, _scene_checks(answers, answers, True))
    try:
        return next((wrong for wrong in found if wrong is not None), None)
    finally:
        answers.close()


def _scene_checks(answers: Answers, few: Answers, gpu: bool) -> list[OptionCheck]:
    """Checks of scenes: those of batches, of prefixes, of few blocks, and of drafts.

    On a CPU each closes its engines, as it may run in a process of its own.

    Args:
        answers: of all layers.
        few: of few layers; the same object where all run.
        gpu: whether engines run on a GPU.
    """
    spec = answers.recompiled.exported.spec
    sizes = (answers.block_size, spec.index_topk, spec.vocab_size)

    @cache
    def small() -> Answers:
        return answers.of_small_blocks()

    def first_wrong(some: Iterable[Scene], those: Answers) -> tuple[str, str] | None:
        found = (_wrong_in(s, answers if s.all_layers else those) for s in some)
        return next(filter(None, found), None)

    def of_batches() -> tuple[str, str] | None:
        mixed = mixed_prompts(*sizes)
        if gpu:  # which rounds, so that of many keys others may be selected: that is no measure
            mixed = (random_tokens(_MEASURED, spec.vocab_size, seed=9),)
        for those in dict.fromkeys((answers, few)):
            problem = those.measure(mixed if those is answers else mixed[:1])
            if problem:
                return ANY, problem
        return first_wrong(scenes(*sizes, gpu), few)

    def of_prefixes() -> tuple[str, str] | None:
        plain = small().plain
        every = prefix_scenes(small().block_size, spec.vocab_size, lambda p: plain([p])[0].tokens,
                              gpu)  # fmt: skip
        return first_wrong(every, small())

    def of_crowds() -> tuple[str, str] | None:
        return first_wrong(crowded_scenes(small().block_size, spec.vocab_size, gpu), small())

    def of_drafts() -> tuple[str, str] | None:
        planned = DRAFT in answers.recompiled.replay.final.plans
        every = drafted_scenes(*sizes, gpu) if planned else looked_up_scenes(spec.vocab_size)
        return first_wrong(every, few)

    def closed(check: OptionCheck, those: Callable[[], Iterable[Answers]]) -> OptionCheck:
        def run() -> tuple[str, str] | None:
            try:
                return check()
            finally:
                for each in those():
                    each.close()

        return check if gpu else run

    return [
        closed(of_batches, lambda: (answers, few)),
        closed(of_prefixes, lambda: (small(),)),
        closed(of_crowds, lambda: (small(),)),
        closed(of_drafts, lambda: (few,)),
    ]


def _wrong_in(scene: Scene, those: Answers) -> tuple[str, str] | None:
    """The setting that makes a scene wrong, and what is wrong; None if it is right."""
    problem = those.problem(scene)
    if not problem:
        return None
    for name, without in scene.without.items():
        if not those.problem(without(scene)):
            return name, f"with it, and not without: {problem}"
    return " with ".join(scene.without), f"not without any one of them: {problem}"


@new_objects_alone()
def _guarded(check: OptionCheck) -> tuple[str, str] | None:
    try:
        return check()
    except Exception as error:  # whatever a wrong runtime raises where every option is off
        return ANY, f"does not run: {in_a_line(error)}"
