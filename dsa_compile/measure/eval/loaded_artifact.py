"""An artifact under evaluation: its graphs, weights and tokenizer, loaded once."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from dsa_compile.artifact.interface import read_regions
from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.reader import Artifact
from dsa_compile.errors import ArtifactError
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.ir.region import Region
from dsa_compile.measure.eval.key_selection import overrides_of
from dsa_compile.measure.eval.probe import ProbeRunner
from dsa_compile.measure.eval.selections import SPARSE
from dsa_compile.runtime.loading.load_runner import require_one_rank, require_runnable
from dsa_compile.runtime.loading.weight_loading import load_weights
from dsa_compile.runtime.requests.prompts import load_tokenizer


@dataclass(frozen=True)
class LoadedArtifact:
    """Artifact loaded for evaluation, made by :meth:`open`.

    Attributes:
        name: what tables call it.
        artifact: checked.
        regions: its graphs by name.
        weights: for each call, by its name, the weights by key.
        tokenizer: a ``tokenizers.Tokenizer``, or None.
        given_model_dir: where the model is now, if the user gave a directory.
    """

    name: str
    artifact: Artifact
    regions: Mapping[str, Region]
    weights: Mapping[str, Mapping[str, Tensor]]
    tokenizer: Any
    given_model_dir: Path | None

    @classmethod
    def open(
        cls, path: Path | str, model_dir: Path | None = None, name: str | None = None
    ) -> "LoadedArtifact":
        """Open an artifact and load its weights.

        Args:
            path: the artifact.
            model_dir: the model it was compiled from, for weights that were moved, and for the
                measures that read the model itself when the artifact has its weights packed.
            name: what tables call it; None for the name of the directory.

        Raises:
            ArtifactError: not a sound artifact, or one that cannot be run.
            CheckpointError: the model's files do not hold what the artifact needs.
            UserError: an artifact of several ranks.
        """
        artifact = Artifact.open(path, verify="header")
        require_runnable(artifact)
        require_one_rank(artifact.path, artifact.manifest, "dsa-eval")
        return cls(
            name=name or artifact.path.resolve().name,
            artifact=artifact,
            regions=read_regions(artifact, rehearse=artifact.manifest.target != "cpu"),
            weights=load_weights(artifact, model_dir),
            tokenizer=load_tokenizer(artifact),
            given_model_dir=model_dir,
        )

    @property
    def manifest(self) -> Manifest:
        """The artifact's manifest."""
        return self.artifact.manifest

    @property
    def spec(self) -> ModelSpec:
        """The model's geometry."""
        return self.manifest.model.spec

    @property
    def is_whole(self) -> bool:
        """Whether all of the model's layers were compiled."""
        return len(self.manifest.layers) == self.spec.num_hidden_layers

    def runner(self, selection: str = SPARSE, seed: int = 0, max_tokens: int = 0) -> ProbeRunner:
        """A runner with caches of its own, for sequences of up to ``max_tokens`` tokens.

        Args:
            selection: see :func:`~dsa_compile.measure.eval.key_selection.overrides_of`.
            seed: of ``random``.
            max_tokens: no less than a few thousand are provided for anyway.

        Raises:
            UserError: an unknown selection, or one that these graphs cannot be given.
        """
        overrides = overrides_of(selection, seed)
        return ProbeRunner(self.manifest, self.regions, self.weights, max_tokens, overrides)

    @cached_property
    def model_dir(self) -> Path:
        """The directory of the model that was compiled.

        Raises:
            ArtifactError: the artifact refers to none and the user named none, or it has changed.
        """
        if self.manifest.weights.model_dir is not None:
            return self.artifact.model_dir(self.given_model_dir)
        if self.given_model_dir is None:
            raise ArtifactError(
                f"{self.artifact.path}: its weights are packed and this reads the model's own; "
                "name the model with --model-dir"
            )
        return self.given_model_dir
