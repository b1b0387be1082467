"""Models with other MTP layers draft in lanes: drafts that share a selection, and A.X-K2's.

Of random weights drafts are right by chance alone: with few words they are, now and then.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, EngineOptions, SamplingParams
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.loading.peers import Alone
from examples.small_models.models import save_hub, tiny_axk2_config, tiny_glm_config, tiny_model
from tests.quick_cases import quick_first

from .conftest import LAYOUTS
from .threads import group_of_threads

GLM, AXK2 = "glm with shared selections", "axk2"
WORDS: dict[str, Any] = {"vocab_size": 8, "eos_token_id": 1, "bos_token_id": 0}
MODELS: dict[str, Callable[[], Any]] = {
    GLM: lambda: tiny_glm_config(
        3,
        index_share_for_mtp_iteration=True,
        indexer_types=["full", "full", "shared"],
        first_k_dense_replace=1,
        **WORDS,
    ),
    AXK2: lambda: tiny_axk2_config(3, **WORDS),
}
ROWS, DRAFTS = 4, 3


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    made: dict[tuple[str, str], Path] = {}

    def find(model: str, layout: str) -> Path:
        if (model, "") not in made:
            made[model, ""] = tmp_path_factory.mktemp("family") / "model"
            save_hub(tiny_model(MODELS[model]()), made[model, ""])
        if (model, layout) not in made:
            made[model, layout] = tmp_path_factory.mktemp("family") / "artifact"
            compile_model(
                made[model, ""], made[model, layout], draft="mtp", block_size=16, target="cpu",
                layout=LAYOUTS[layout], records=False,
            )  # fmt: skip
        return made[model, layout]

    return find


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), quick_first([(GLM, "dp2ep2"), (GLM, "dp2"), (AXK2, "dp2ep2")])
)
def test_lanes_of_a_family_draft(compiled, model: str, layout: str) -> None:
    """Tokens without drafts, and drafts of one rank."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 8, (n,), generator=generator).tolist() for n in (5, 40, 17)]
    params = [
        SamplingParams(max_tokens=20 + 4 * n, temperature=0.5 * n, seed=n, ignore_eos=True)
        for n in range(3)
    ]

    def answers(name: str, drafts: int) -> list[Any]:
        options = EngineOptions(
            num_gpu_blocks_override=40, max_num_seqs=ROWS, num_speculative_tokens=drafts
        )
        path, shape = compiled(model, name), LAYOUTS[name]
        runners = [load_runner(path, options, Alone(rank)) for rank in range(shape.world)]
        if model == GLM and drafts:
            drafter = runners[0].drafter
            assert drafter is not None
            assert "selected" in drafter.states
        with Engine(group_of_threads(runners, shape, ROWS), options) as engine:
            return engine.generate(prompts, params)

    plain, alone, found = answers("one", 0), answers("one", DRAFTS), answers(layout, DRAFTS)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert [o.drafted for o in found] == [o.drafted for o in alone]
    assert [o.accepted for o in found] == [o.accepted for o in alone]
    assert sum(sum(output.accepted) for output in found) > 0
