"""Programs as passes take them, and the folder that keeps their models."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import ONE_RANK, Layout
from dsa_compile.frontend.build import build_program
from dsa_compile.ir.program import Program
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from dsa_compile.weights.checkpoint import Checkpoint
from tests.planted_bugs.models import model_dir

LENGTH = 27  # of which the first 16 see no more than index_topk keys; two pages


@dataclass(frozen=True)
class Bench:
    """Program and data with which a fault is looked for.

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

    def replay(self, layout: Layout = ONE_RANK, stop_after: str | None = None) -> Replay:
        """All passes, for a layout."""
        config = replace(self.exported.config, layout=layout, stop_after=stop_after)
        return Replay(self.exported.fork(config))

    @property
    def recompiled(self) -> RecompiledArtifact:
        """As of an artifact, which would keep trials; here none is made."""
        nothing = None
        return RecompiledArtifact(
            nothing,  # type: ignore[arg-type]
            self.exported,
            self.model_dir,
            dummy=False,
            replay=self.replay(),
            store=self.store,
        )


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models that were made."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def bench(models: Path) -> Callable[..., Bench]:
    """Gives the bench of a model and a recipe."""

    def of(model: str, recipe: str = "fp32") -> Bench:
        folder = model_dir(model, models)
        draft = "mtp" if model.endswith("mtp") else None
        config = CompileConfig(
            target="cpu", recipe=recipe, block_size=16, records=False, draft=draft
        )
        exported = build_program(folder, config)
        layers = range(exported.spec.num_hidden_layers + bool(draft))
        store = WeightStore(Checkpoint.open(folder, exported.spec, layers))
        tokens = random_tokens(LENGTH, exported.spec.vocab_size)
        prompt = Prompt.of(tokens, exported.spec.index_topk, 16)
        return Bench(exported, store, prompt, folder)

    return of
