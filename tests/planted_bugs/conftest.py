"""Exported programs of a small model, one for each recipe, into whose passes bugs are planted."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.program import Program
from dsa_compile.testing.models import save_hf, save_hub, tiny_config, tiny_glm_config, tiny_model
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.weights.checkpoint import Checkpoint

LENGTH = 27  # of which the first 16 see no more than index_topk keys; two pages


@dataclass(frozen=True)
class Bench:
    """Program and data with which a bug is looked for.

    Attributes:
        exported: the program before any pass.
        store: gives the weights.
        prompt: random tokens.
        model_dir: of the model.
    """

    exported: Program
    store: WeightStore
    prompt: Prompt
    model_dir: Path


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bench]:
    """Gives the bench of a recipe and a target: a dense layer and two MoE layers.

    Of GLM the second MoE layer reuses the selection of the first. With ``draft`` there is a
    multi-token-prediction layer, and plans that draft with it.
    """
    folders: dict[tuple[bool, bool], Path] = {}
    made: dict[tuple[str, str, bool, bool], Bench] = {}

    def of(recipe: str, target: str = "cpu", *, glm: bool = False, draft: bool = False) -> Bench:
        if (glm, draft) not in folders:
            folder = folders[glm, draft] = tmp_path_factory.mktemp("model")
            make = tiny_glm_config if glm else tiny_config
            model = tiny_model(make(3, first_k_dense_replace=1))
            save_hub(model, folder, fp8=False) if draft else save_hf(model, folder)
        key = (recipe, target, glm, draft)
        if key not in made:
            folder = folders[glm, draft]
            config = CompileConfig(
                recipe=recipe,
                target=target,
                block_size=16,
                records=False,
                draft="mtp" if draft else None,
            )
            exported = build_program(folder, config)
            store = WeightStore(Checkpoint.open(folder, exported.spec, range(3 + draft)))
            tokens = random_tokens(LENGTH, exported.spec.vocab_size)
            prompt = Prompt.of(tokens, exported.spec.index_topk, 16)
            made[key] = Bench(exported, store, prompt, folder)
        return made[key]

    return of
