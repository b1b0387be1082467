"""Bugs of the variants of prompts: found and named by verify, and by halving."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.pass_record import PassRecord
from dsa_compile.ir.plan import PROMPTS
from dsa_compile.ir.program import Program
from dsa_compile.passes.split_prompts import SplitPrompts
from dsa_compile.verify.bisect.criteria import ReferenceCheck
from dsa_compile.verify.bisect.culprit import find_culprit
from dsa_compile.verify.bisect.search import Log
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.replay import Replay
from tests.planted_bugs.conftest import Bench
from tests.planted_bugs.planting import Plant, PlantedBug, Struck, inserting, scaled, swapped

dsa = torch.ops.dsa
EXPAND, SPLIT = "expand_prompt_attention", "split_prompts"


def _without_index_keys(patch: pytest.MonkeyPatch, struck: Struck) -> None:
    """The prompt regions of one kind leave out what later steps read."""
    whole = SplitPrompts.run

    def run(self: SplitPrompts, program: Program, record: PassRecord) -> None:
        whole(self, program, record)
        graph = program.regions["moe.prompt"].graph
        graph.erase_node(next(n for n in graph.nodes if n.target is dsa.write_index_cache.default))
        struck.sites.add(1)

    patch.setattr(SplitPrompts, "run", run)


def _expanding(op: Any, change: Any, region: str = "moe") -> Plant:
    return inserting(EXPAND, op.default, change, region=region)


def _of_all_tokens(edit: Editor, op: Any, args: tuple[Any, ...]) -> Any:
    """Attend to all tokens and not to those that were selected."""
    return op, args[:-1]


FP32 = (
    PlantedBug("prompt regions write no index keys", SPLIT, _without_index_keys),
    PlantedBug(
        "positions for slots", EXPAND, _expanding(dsa.paged_prompt_attention, swapped(3, 4))
    ),
    PlantedBug(
        "selections of long prompts left out",
        EXPAND,
        _expanding(dsa.paged_prompt_attention, _of_all_tokens, "moe.long_prompt"),
    ),
    PlantedBug("scale of prompts", EXPAND, _expanding(dsa.paged_prompt_attention, scaled(7, 1.01))),
    PlantedBug("angles of prompts", EXPAND, _expanding(dsa.rope_interleaved, swapped(1, 2))),
)
FP8 = (
    PlantedBug(
        "scale of prompts over FP8",
        EXPAND,
        _expanding(dsa.paged_prompt_attention_fp8, scaled(7, 1.1)),
        recipe="fp8",
    ),
)


def name(bug: PlantedBug) -> str:
    return bug.name


@pytest.mark.parametrize("bug", FP32 + FP8, ids=name)
def test_verification_names_the_pass(
    bug: PlantedBug, bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, struck = bench(bug.recipe), Struck()
    with monkeypatch.context() as patch:
        bug.plant(patch, struck)
        report = verify(Replay(on.exported), on.store, on.prompt, [SPLIT, EXPAND])
    assert [done.name for done in report.passes if done.problem] == [bug.pass_name]
    if bug.pass_name == EXPAND:
        assert {(site.pass_name, site.number) for site in report.wrong} == {
            (EXPAND, number) for number in struck.sites
        }


@pytest.mark.parametrize("bug", FP32, ids=name)
def test_bisection_names_pass_and_site(
    bug: PlantedBug,
    bench: Callable[..., Bench],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    on, struck = bench(bug.recipe), Struck()
    with monkeypatch.context() as patch:
        bug.plant(patch, struck)
        replay = Replay(on.exported)
        check = ReferenceCheck(replay, on.store, on.prompt, on.exported)
        found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    assert found.rewrite is not None
    assert (found.rewrite.pass_name, found.rewrite.number) == (bug.pass_name, min(struck.sites))
    assert found.trials <= 2 * math.log2(replay.count)
    assert found.reproducer is not None


@pytest.mark.parametrize("recipe", ["fp32", "fp8"])
def test_nothing_is_wrong_without_a_bug(bench: Callable[..., Bench], recipe: str) -> None:
    on = bench(recipe)
    replay = Replay(on.exported)
    report = verify(replay, on.store, on.prompt, [SPLIT, EXPAND])
    assert report.ok, report.wrong
    tried = {site.region for site in report.sites if site.pass_name == EXPAND}
    assert tried == {f"{kind}.{of}" for kind in ("dense", "moe") for of in PROMPTS}
