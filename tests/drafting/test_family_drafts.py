"""GLM and A.X-K2 draft with their MTP layers: states of transformers, tokens of no drafts.

Of random weights drafts are right by chance alone: with few words they are, now and then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.artifact.reader import Artifact
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.hf import HfModel
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.loading.load_runner import load_runner
from examples.small_models.models import save_hub, tiny_axk2_config, tiny_glm_config, tiny_model

from .conftest import sizes

pytestmark = pytest.mark.slow
GLM = "glm with shared selections"
NO_OTHER = "glm without another layer of the draft's kind"
AXK2 = "axk2"
WORDS: dict[str, Any] = {"vocab_size": 8, "eos_token_id": 1, "bos_token_id": 0}
MODELS: dict[str, Callable[[], Any]] = {
    GLM: lambda: tiny_glm_config(5, **WORDS),
    NO_OTHER: lambda: tiny_glm_config(
        3, indexer_types=["full", "full", "shared"], first_k_dense_replace=2, **WORDS
    ),
    AXK2: lambda: tiny_axk2_config(3, **WORDS),
}


@dataclass(frozen=True)
class Made:
    model_dir: Path
    artifact: Path

    def runner(self, drafts: int) -> Any:
        options = EngineOptions(
            num_gpu_blocks_override=60, max_num_seqs=8, num_speculative_tokens=drafts
        )
        return load_runner(self.artifact, options)


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("family")
    save_hub(tiny_model(MODELS[request.param]()), root / "model")
    compile_model(root / "model", root / "artifact", draft="mtp", block_size=16, records=False)
    return Made(root / "model", root / "artifact")


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, 8, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("padded", [False, True])
def test_tokens_are_those_without_drafts(made: Made, padded: bool) -> None:
    """Contexts on either side of what the indexer keeps, 16 keys, and some that cross it."""
    some = prompts([1, 9, 14, 27, 40])
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=float(n % 2), seed=n)
        for n in range(len(some))
    ]
    runner = made.runner(3)
    if padded:
        runner.pad_to(sizes(runner, None))
    engine = Engine(
        runner, EngineOptions(max_num_seqs=8, async_scheduling=padded, max_num_batched_tokens=40)
    )
    found = engine.generate(some, params)
    wanted = Engine(made.runner(0), EngineOptions(max_num_seqs=8)).generate(some, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert engine.stats().accepted[0] > 0


def test_states_of_drafts_are_those_of_transformers(made: Made) -> None:
    (prompt,) = prompts([27])
    runner = made.runner(3)
    seen: dict[int, torch.Tensor] = {}
    runner.drafter.observer = lambda depth, states: seen.setdefault(depth, states["normed"][0])
    engine = Engine(runner, EngineOptions(max_num_seqs=1, num_speculative_tokens=3))
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    first = engine.generate([prompt], params)[0].token_ids[0]
    model = HfModel(made.model_dir, Artifact.open(made.artifact).manifest.model.spec)
    drafts, normed = model._drafts, model._model.model.norm(model.residuals(prompt)[-1])
    tokens = [*prompt[1:], first]
    for depth in (1, 2):
        states = drafts.run(torch.tensor(tokens), normed)
        torch.testing.assert_close(seen[depth], states.normed[-1], rtol=1e-4, atol=1e-4)
        tokens.append(int(states.logits[-1].argmax()))
        normed = torch.cat([normed, states.normed[-1:]])
