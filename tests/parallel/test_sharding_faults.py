"""Wrong cuts whose graphs are sound: verify finds each at the pass that made it.

Values decide, not structure: parts that belong to another rank, or pieces cut where they should not
be. What structure shows is found without running (``tests/ir/test_placement_check.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.frontend.build import build_program
from dsa_compile.passes import place
from dsa_compile.verify.checks.report import VerifyReport
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.parameters import RandomParameters, WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.weights.plan import Concat, Constant, Narrow, Shard, WeightEntry
from examples.small_models.models import tiny_config

TP2 = Layout(tp=2, shard_embedding=True)
EP2 = replace(TP2, ep=2)


@dataclass(frozen=True)
class Clean:
    """A sound compilation, to plant faults in one pass of it."""

    replay: Replay
    store: WeightStore
    prompt: Prompt

    def check(self, layout: Layout = TP2) -> VerifyReport:
        """Run the pass that cuts again, on the program that it was given, and verify it."""
        run = next(run for run in self.replay.runs if run.step.name == "place")
        before = run.before.fork(replace(run.before.config, layout=layout))
        return verify(Replay(before, [run.step]), self.store, self.prompt)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_config(2, first_k_dense_replace=1).save_pretrained(folder)
    config = CompileConfig(target="cpu", weights="none", layout=TP2, records=False, block_size=16)
    program = build_program(folder, replace(config, stop_after="place"))
    spec = program.spec
    tokens = random_tokens(spec.index_topk + 8, spec.vocab_size)
    prompt = Prompt.of(tokens, spec.index_topk, 16)
    return Clean(Replay(program), WeightStore(RandomParameters(spec, [0, 1])), prompt)


def planted(monkeypatch, key: str, change: Callable[[Shard], Shard]) -> None:
    """Change the cut of a weight behind the back of the pass that made it."""
    keep = place.keep_part

    def wrong(edit, program, weight, cut) -> None:
        keep(edit, program, weight, cut)
        kind, name = edit.region.kind, weight.meta["key"]
        if name.endswith(key):
            entry = program.weights.remove(kind, name)
            assert isinstance(entry.expr, Shard)
            program.weights.define(
                kind, name, WeightEntry(entry.dtype, entry.shape, change(entry.expr))
            )

    monkeypatch.setattr(place, "keep_part", wrong)


def of_the_other_rank(cut: Shard) -> Shard:
    halves = [Narrow(cut.dim, start, cut.length, cut.of) for start in (cut.length, 0)]
    return replace(cut, of=Concat(cut.dim, tuple(halves)))


def found_in(report: VerifyReport, path: str) -> None:
    """The pass is found, and no site of it but those at a path."""
    assert not report.ok
    (done,) = report.passes
    assert (done.name, bool(done.problem)) == ("place", True)
    assert {site.pass_name for site in report.wrong} <= {"place"}
    assert report.wrong
    assert all(path in site.path for site in report.wrong), report.wrong


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TP2, EP2], ids=str)
def test_sound_cuts_are_right(clean: Clean, layout: Layout) -> None:
    assert [done.problem for done in clean.check(layout).passes] == [""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("self_attn", "q_b_proj.weight"),
        ("self_attn", "w_uk"),
        ("self_attn", "w_uv"),
        ("self_attn", "o_proj.weight"),
        ("mlp", "gate_proj.weight"),
        ("mlp", "down_proj.weight"),
        ("head", "lm_head.weight"),
        ("embed", "embed_tokens.weight"),
    ],
)
def test_the_part_of_another_rank(clean: Clean, monkeypatch, path: str, key: str) -> None:
    planted(monkeypatch, key, of_the_other_rank)
    found_in(clean.check(), path)


@pytest.mark.slow
def test_gate_and_up_cut_as_one_piece(clean: Clean, monkeypatch) -> None:
    planted(
        monkeypatch,
        "gate_up_proj",
        lambda cut: replace(cut, stacked=1, length=cut.length * cut.stacked),
    )
    found_in(clean.check(), "mlp")


@pytest.mark.slow
def test_the_experts_of_another_rank(clean: Clean, monkeypatch) -> None:
    def turned(dtype, shape, values) -> Constant:
        half = len(values) // 2
        return Constant(dtype, shape, (*values[half:], *values[:half]))

    monkeypatch.setattr(place, "Constant", turned)
    found_in(clean.check(EP2), "mlp")


def test_an_expert_that_no_rank_has(clean: Clean, monkeypatch) -> None:
    def lost(dtype, shape, values) -> Constant:
        return Constant(dtype, shape, (-1, *values[1:]))

    monkeypatch.setattr(place, "Constant", lost)
    found_in(clean.check(EP2), "mlp")
