"""Deeper drafts attend to what the first draft of a step selected, where GLM's configuration says.

The selection is that of the last token which was verified: a wrong one leaves tokens as they are,
and is found by the states of drafts, by ``dsa-eval`` and by ``bisect``.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ConfigError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.plan import DEEPER, DRAFT
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.draft_chains import chains_of
from dsa_compile.measure.eval.engine_acceptance import drafting_engine, engine_acceptance
from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.execution.drafter import Drafter as PlannedDrafter
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.verify.bisect.runtime_answers import Answers
from dsa_compile.verify.bisect.runtime_scenes import drafted_scenes
from dsa_compile.verify.checks.verify_compilation import verify
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.verify.inputs.reference import export_report
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights.checkpoint import Checkpoint
from examples.small_models.models import save_hub, tiny_glm_config, tiny_model
from tests.verify.drafting_check import DRAFTING, wrong_drafting

from .conftest import BLOCK_SIZE, sizes

Patch = pytest.MonkeyPatch
SHARED = "index_share_for_mtp_iteration"
TOPK = 16
# Few words: drafts of random weights are right by chance, and some of a step's are.
WORDS: dict[str, Any] = {"vocab_size": 8, "eos_token_id": 1, "bos_token_id": 0}
FULL = ["full", "full"]
DEPTH = 3


def saved(path: Path, kinds: list[str], **overrides: Any) -> Path:
    fields = {SHARED: True, "first_k_dense_replace": 1, "indexer_types": kinds}
    model = tiny_model(tiny_glm_config(len(kinds), **{**fields, **overrides}))
    save_hub(model, path, fp8=False)
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No layer of the model reuses a selection: the MTP layer alone is run in both ways."""
    return saved(tmp_path_factory.mktemp("model"), FULL, **WORDS)


@pytest.fixture(scope="module")
def shared(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared") / "artifact"
    compile_model(model_dir, path, draft="mtp", block_size=BLOCK_SIZE, records=False)
    return path


@pytest.fixture(scope="module")
def many_words(tmp_path_factory: pytest.TempPathFactory) -> RecompiledArtifact:
    """Artifact with more words, as bisect's drafts need; a layer of the model reuses, too."""
    model, path = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("out") / "mtp"
    saved(model, [*FULL, "shared"])
    compile_model(model, path, draft="mtp", block_size=BLOCK_SIZE, records=False)
    return RecompiledArtifact.open(path)


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 8, (n,), generator=generator).tolist() for n in lengths]


def runner_of(path: Path, drafts: int, **options: Any) -> Any:
    chosen = {
        "num_gpu_blocks_override": 60,
        "max_num_seqs": 8,
        "num_speculative_tokens": drafts,
        **options,
    }
    return load_runner(path, EngineOptions(**chosen))


def test_deeper_drafts_run_the_layer_without_its_indexer(shared: Path) -> None:
    manifest = Artifact.open(shared).manifest
    first, deeper = (manifest.plans[name].layers[0] for name in (DRAFT, DEEPER))
    assert (first.kind, deeper.kind) == ("moe", "moe_reuse")
    assert first.caches == deeper.caches == "draft_layer"
    assert {cache.key for cache in manifest.caches["moe_reuse"]} == {"latent_cache"}
    runner = runner_of(shared, DEPTH)
    assert runner.drafter.carried == ("normed",)
    assert runner.drafter.states["selected"].shape == (9, TOPK)
    mine, theirs = (runner._weights[name] for name in ("deeper_draft_layer", "draft_layer"))
    experts = [key for key in mine if "experts" in key]
    assert experts
    assert all(mine[key] is theirs[key] for key in experts)
    assert not any("indexer" in key for key in mine)


@pytest.mark.slow
@pytest.mark.parametrize("value", [False, None])
def test_without_the_field_every_draft_selects(
    value: bool | None, model_dir: Path, tmp_path: Path
) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, SHARED: value}))
    plans = build_program(tmp_path, CompileConfig(draft="mtp")).plans
    assert plans[DRAFT].kinds == plans[DEEPER].kinds
    (tmp_path / "config.json").write_text(json.dumps({**config, SHARED: 1}))
    with pytest.raises(ConfigError, match=f"{SHARED}=1 should be bool"):
        build_program(tmp_path, CompileConfig(draft="mtp"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "padded"),
    [({}, False), ({"async_scheduling": True}, True), ({"deterministic": True}, False)],
    ids=["one after another", "ahead and padded", "deterministic"],
)
def test_tokens_are_those_without_drafts(
    shared: Path, options: dict[str, Any], padded: bool
) -> None:
    """Contexts on either side of what the indexer keeps, some that cross it, few blocks."""
    some = prompts([1, 9, 14, 27, 40, 13])
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=float(n % 2), seed=n)
        for n in range(len(some))
    ]
    fixed = {"deterministic": options.get("deterministic", False)}
    runner = runner_of(shared, DEPTH, num_gpu_blocks_override=13, **fixed)
    if padded:
        runner.pad_to(sizes(runner, None))
    engine = Engine(runner, EngineOptions(max_num_seqs=8, max_num_batched_tokens=48, **options))
    found = engine.generate(some, params)
    plain = Engine(runner_of(shared, 0, **fixed), EngineOptions(max_num_seqs=8, **fixed))
    assert [o.token_ids for o in found] == [o.token_ids for o in plain.generate(some, params)]
    assert engine.stats().accepted[0] > 0
    assert engine.stats().preemptions > 0


@pytest.mark.slow
def test_ranks_share_their_own_selections(model_dir: Path, shared: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"draft": "mtp", "block_size": BLOCK_SIZE, "records": False}
    compile_model(model_dir, tmp_path / "two", layout=Layout(tp=2), **options)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0)
    answers, accepted = [], []
    for path in (shared, tmp_path / "two"):
        engine = Engine.load(
            path, num_gpu_blocks_override=60, max_num_seqs=8, num_speculative_tokens=DEPTH
        )
        try:
            answers.append([o.token_ids for o in engine.generate(prompts([9, 14, 40]), params)])
            accepted.append(engine.stats().accepted)
        finally:
            engine.close()
    assert answers[0] == answers[1]
    assert accepted[0] == accepted[1]


def test_states_of_drafts_are_those_of_transformers(shared: Path, model_dir: Path) -> None:
    """Layer of drafts without an indexer gets what the one with one selected for the first."""
    (prompt,) = prompts([27])
    runner = runner_of(shared, DEPTH)
    seen: dict[int, torch.Tensor] = {}
    runner.drafter.observer = lambda depth, states: seen.setdefault(depth, states["normed"][0])
    engine = Engine(runner, EngineOptions(max_num_seqs=1, num_speculative_tokens=DEPTH))
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    first = engine.generate([prompt], params)[0].token_ids[0]
    model = HfModel(model_dir, Artifact.open(shared).manifest.model.spec)
    drafts, normed = model._drafts, model._model.model.norm(model.residuals(prompt)[-1])
    tokens, selected = [*prompt[1:], first], None
    for depth in range(1, DEPTH + 1):
        states = drafts.run(torch.tensor(tokens), normed, selected)
        torch.testing.assert_close(seen[depth], states.normed[-1], rtol=1e-4, atol=1e-4)
        tokens.append(int(states.logits[-1].argmax()))
        normed = torch.cat([normed, states.normed[-1:]])
        selected = torch.cat([states.selected, states.selected[-1:]])
        assert int(selected[-1].max()) < len(prompt)  # none of the chain's own


def of_the_steps_last_row(patch: Patch) -> None:
    """Keep what the last row of a step selected, whether its drafts were right or not."""
    begin = PlannedDrafter.begin

    def wrong(self: Any, rows: Any, values: Any, *args: Any) -> None:
        begin(self, rows, values, *args)
        last = rows.places.gather(1, rows.max_new[:, None] - 1)[:, 0]
        self.states["selected"][rows.rows] = values["selected"][last]

    patch.setattr(PlannedDrafter, "begin", wrong)


def of_the_steps_first_row(patch: Patch) -> None:
    """Keep what the first row of a step selected, although later ones were verified."""
    begin = PlannedDrafter.begin

    def wrong(self: Any, rows: Any, values: Any, *args: Any) -> None:
        begin(self, rows, values, *args)
        self.states["selected"][rows.rows] = values["selected"][rows.places[:, 0]]

    patch.setattr(PlannedDrafter, "begin", wrong)


def of_the_step_before(patch: Patch) -> None:
    """Go on with the selection of the first step that drafted."""
    begin = PlannedDrafter.begin

    def wrong(self: Any, rows: Any, *args: Any) -> None:
        before = self.states["selected"][rows.rows].clone()
        begin(self, rows, *args)
        old = (before >= 0).any(1, keepdim=True)
        new = self.states["selected"][rows.rows]
        self.states["selected"][rows.rows] = torch.where(old, before, new)

    patch.setattr(PlannedDrafter, "begin", wrong)


def of_another_request(patch: Patch) -> None:
    """Read selections by a request's place in the step, and not by its row."""
    deepen = PlannedDrafter.deepen

    def wrong(self: Any, rows: Any, variant: str) -> Any:
        right = self.states["selected"]
        self.states["selected"] = right.roll(1, 0)
        made = deepen(self, rows, variant)
        self.states["selected"] = right
        return made

    patch.setattr(PlannedDrafter, "deepen", wrong)


FAULTS: list[Callable[[Patch], None]] = [
    of_the_steps_last_row,
    of_the_steps_first_row,
    of_the_step_before,
    of_another_request,
]


def agree(path: Path) -> None:
    """Require the agreement that ``dsa-eval --only mtp`` requires of an engine."""
    loaded = LoadedArtifact.open(path)
    drafts, engine = chains_of(loaded, 120), drafting_engine(loaded, DEPTH, 120)
    found = engine_acceptance(engine, drafts, prompts([12, 30]), 40, DEPTH, exact=True)
    found.require_agreement()


def test_the_measure_shares_selections(shared: Path, monkeypatch: Patch) -> None:
    agree(shared)
    with monkeypatch.context() as patch:
        of_the_steps_last_row(patch)
        with pytest.raises(UserError, match="see wrong states"):
            agree(shared)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_anchor_is_reported(
    fault: Callable[[Patch], None], shared: Path, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    with pytest.raises(UserError, match="see wrong states"):
        agree(shared)


def few(recompiled: RecompiledArtifact) -> Answers:
    return Answers(recompiled, exact=True).of_few_layers()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_bisect_names_drafting_for_a_wrong_anchor(
    fault: Callable[[Patch], None], many_words: RecompiledArtifact, monkeypatch: Patch
) -> None:
    assert wrong_drafting(few(many_words)) is None
    fault(monkeypatch)
    found = wrong_drafting(few(many_words))
    assert found is not None
    assert found[0] == DRAFTING
    assert "draft 2" in found[1] or "draft 3" in found[1], found[1]


@pytest.mark.slow
def test_drafts_are_those_of_the_finished_plans(
    many_words: RecompiledArtifact, monkeypatch: Patch
) -> None:
    answers, spec = few(many_words), many_words.exported.spec
    assert not answers.measure([(3, 1, 4, 1, 5)])
    some = list(drafted_scenes(BLOCK_SIZE, spec.index_topk, spec.vocab_size))
    assert [answers.problem(scene) for scene in some] == ["", ""]
    of_another_request(monkeypatch)
    assert answers.problem(some[0]).startswith("draft ")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp32", "fp8"])
def test_every_rewrite_of_the_draft_plans_is_verified(model_dir: Path, recipe: str) -> None:
    config = CompileConfig(recipe=recipe, draft="mtp", block_size=BLOCK_SIZE, records=False)
    exported = build_program(model_dir, config)
    store = WeightStore(Checkpoint.open(model_dir, exported.spec, range(3)))
    prompt = Prompt.of(random_tokens(27, exported.spec.vocab_size), TOPK, BLOCK_SIZE)
    report = verify(Replay(exported), store, prompt)
    assert report.ok, (report.wrong, report.hazards, [p.problem for p in report.passes])
    assert {"moe", "moe_reuse"} <= {site.region for site in report.sites if site.layer == 2}


@pytest.mark.slow
def test_what_is_exported_is_compared_with_transformers(many_words: RecompiledArtifact) -> None:
    """A deeper draft that selects by itself is another one."""
    spec = many_words.exported.spec
    prompt = Prompt.of(random_tokens(27, spec.vocab_size), TOPK, BLOCK_SIZE)
    assert not export_report(many_words, prompt).problem
    plan = many_words.exported.plans[DEEPER]
    calls = tuple(c if c.layer is None else replace(c, kind="moe") for c in plan.calls)
    plans = {**many_words.exported.plans, DEEPER: replace(plan, calls=calls)}
    wrong = replace(many_words, exported=replace(many_words.exported, plans=plans))
    assert export_report(wrong, prompt).problem.startswith(f"layer {spec.mtp_layer} differs")
