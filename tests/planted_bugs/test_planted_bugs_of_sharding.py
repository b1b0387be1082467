"""Planted bugs of several ranks, each found at its pass and site by every tool that looks for it.

A bug is planted behind the last pass before the first cut: what is before it is compiled once.
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsa_compile.errors import CompileError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.passes import Pass
from dsa_compile.ir.program import Program
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.passes.pipeline import PIPELINE
from dsa_compile.testing.models import tiny_config
from dsa_compile.verify.bisect.criteria import ReferenceCheck
from dsa_compile.verify.bisect.culprit import find_culprit
from dsa_compile.verify.bisect.search import Log
from dsa_compile.verify.checks.rank_fault import rank_fault
from dsa_compile.verify.checks.unsharded import compare_with_unsharded
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.parameters import RandomParameters, WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from tests.planted_bugs.catalogue_sharding import EP2, SHARDING, TP2, ShardingBug
from tests.planted_bugs.conftest import LENGTH
from tests.planted_bugs.planting import Struck
from tests.planted_bugs.sampled import sampled

# Parts of quantised dimensions are whole blocks of 128.
_IN_BLOCKS = {
    "hidden_size": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "index_head_dim": 128,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
}
_NAMES = [step.name if isinstance(step, Pass) else "" for step in PIPELINE]
_CUTTING = PIPELINE[_NAMES.index("shard_attention") :]


@dataclass(frozen=True)
class Uncut:
    """A program as the first pass that cuts takes it."""

    program: Program
    store: WeightStore
    prompt: Prompt

    def replay(self, bug: ShardingBug) -> Replay:
        """The rest of the passes, with the bug's layout."""
        return Replay(self.start(bug), _CUTTING)

    def unsharded(self) -> Replay:
        """The rest of the passes for one rank."""
        config = replace(self.program.config, layout=ONE_RANK)
        return Replay(self.program.fork(config), _CUTTING)

    def start(self, bug: ShardingBug) -> Program:
        """The program, with the bug's layout."""
        return self.program.fork(replace(self.program.config, layout=bug.layout))


@pytest.fixture(scope="session")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Uncut]:
    made: dict[str, Uncut] = {}

    def of(recipe: str) -> Uncut:
        if recipe not in made:
            folder: Path = tmp_path_factory.mktemp("model")
            sizes = _IN_BLOCKS if recipe == "fp8" else {}
            tiny_config(2, first_k_dense_replace=1, **sizes).save_pretrained(folder)
            config = CompileConfig(
                target="cpu", weights="none", recipe=recipe, layout=TP2, records=False,
                block_size=16, stop_after="insert_paged_caches",
            )  # fmt: skip
            program = Replay(build_program(folder, config)).final
            spec = program.spec
            program = program.fork(replace(program.config, stop_after=None))
            store = WeightStore(RandomParameters(spec, [0, 1]))
            prompt = Prompt.of(random_tokens(LENGTH, spec.vocab_size), spec.index_topk, 16)
            made[recipe] = Uncut(program, store, prompt)
        return made[recipe]

    return of


def named(bug: ShardingBug, struck: Struck) -> set[tuple[str, int]]:
    assert struck.sites
    return {(bug.pass_name, number) for number in struck.sites}


def some(*names: str) -> list[ShardingBug]:
    found = [bug for bug in SHARDING if bug.name in names]
    assert len(found) == len(names)
    return found


def name_of(bug: ShardingBug) -> str:
    return bug.name


@pytest.mark.parametrize(
    "bug",
    [
        *sampled([bug for bug in SHARDING if bug.recipe == "fp32"]),
        *(
            pytest.param(bug, id=bug.name, marks=pytest.mark.slow)
            for bug in SHARDING
            if bug.recipe != "fp32"  # each recipe is a model to export
        ),
    ],
)
def test_verification_names_pass_and_site(
    bug: ShardingBug, uncut: Callable[[str], Uncut], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, struck = uncut(bug.recipe), Struck()
    bug.plant(monkeypatch, struck)
    report = verify(on.replay(bug), on.store, on.prompt, [bug.pass_name])
    found = {(site.pass_name, site.number) for site in report.wrong}
    found |= {(hazard.pass_name, hazard.number) for hazard in report.hazards}
    found |= {(done.name, done.suspect) for done in report.passes if done.suspect}
    assert found == named(bug, struck) or (bug.structural and found <= named(bug, struck))
    assert min(named(bug, struck)) in found
    assert [done.name for done in report.passes if done.problem] == [bug.pass_name]


@pytest.mark.parametrize(
    "bug", [bug for bug in SHARDING if bug.structural and bug.recipe == "fp32"], ids=name_of
)
def test_compilation_names_the_pass(
    bug: ShardingBug, uncut: Callable[[str], Uncut], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, struck = uncut(bug.recipe), Struck()
    bug.plant(monkeypatch, struck)
    fault = rank_fault(on.replay(bug))
    assert fault is not None
    assert (fault.run.step.name, fault.number) == min(named(bug, struck))
    with pytest.raises(CompileError, match=f"^pass {bug.pass_name}.*: ranks cannot run what it"):
        run_pipeline(on.start(bug), pipeline=_CUTTING)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    some("halves of o_proj exchanged", "experts of the other rank",
         "shared expert of the first rank on every rank"),
    ids=name_of,
)  # fmt: skip
def test_comparison_with_one_rank_names_pass_and_site(
    bug: ShardingBug, uncut: Callable[[str], Uncut], monkeypatch: pytest.MonkeyPatch
) -> None:
    on, struck = uncut("fp32"), Struck()
    bug.plant(monkeypatch, struck)
    report = compare_with_unsharded(on.replay(bug), on.unsharded(), on.store, on.prompt)
    assert report.wrong is not None
    assert (report.wrong.name, report.wrong.number) == min(named(bug, struck))
    assert [done.problem for done in report.passes[:-1]] == [""] * (len(report.passes) - 1)


@pytest.mark.parametrize(
    ("layout", "last"), [(TP2, "shard_mlps"), (EP2, "join_all_reduces")], ids=["tp2", "ep2"]
)
def test_sound_values_are_those_of_one_rank(
    layout: Layout, last: str, uncut: Callable[[str], Uncut]
) -> None:
    on = uncut("fp32")
    program = on.program.fork(replace(on.program.config, layout=layout, stop_after=last))
    replay = Replay(program, _CUTTING)
    report = compare_with_unsharded(replay, on.unsharded(), on.store, on.prompt)
    assert report.wrong is None
    assert [done.name for done in report.passes][-1] == last
    for done in report.passes:
        assert min(done.alike, done.parts, done.sums) > 0
        assert done.error < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("bug", some("experts of the other rank"), ids=name_of)
def test_bisection_names_pass_and_site(
    bug: ShardingBug, uncut: Callable[[str], Uncut], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on, struck = uncut(bug.recipe), Struck()
    bug.plant(monkeypatch, struck)
    replay = on.replay(bug)
    check = ReferenceCheck(replay, on.store, on.prompt, on.start(bug))
    found = find_culprit(replay, on.store, on.prompt, check, Log("test"), tmp_path)
    assert found.rewrite is not None
    assert (found.rewrite.pass_name, found.rewrite.number) == min(named(bug, struck))
    assert found.problem
    assert found.reproducer is not None
    script = [sys.executable, str(found.reproducer / "reproduce.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert all(f", rank {rank}: " in done.stdout for rank in (0, 1))
    assert "differ, relative error" in done.stdout
