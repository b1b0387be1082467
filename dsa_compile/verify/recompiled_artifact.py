"""An artifact to debug, with its compilation repeated on the model that it was compiled from."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.records import Producer
from dsa_compile.common.names import hint
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import ONE_RANK
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.frontend.build import build_program
from dsa_compile.frontend.reference import frontend_faults_named
from dsa_compile.ir.program import Program
from dsa_compile.measure.eval.reference_model import NO_MODEL, has_reference
from dsa_compile.passes.manager import run_pipeline
from dsa_compile.runtime.requests.prompts import load_tokenizer, token_ids_of
from dsa_compile.verify.checks.artifact_check import (
    emission_problems,
    export_problems,
    weight_problems,
)
from dsa_compile.verify.execution.forked import usable_processes
from dsa_compile.verify.execution.replay import Replay
from dsa_compile.verify.inputs.parameters import Parameters, RandomParameters, WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.weights.canonical import canonical_parameters
from dsa_compile.weights.checkpoint import Checkpoint

MOST_TOKENS = 512
"""Tokens of the default prompt at most; where ``index_topk`` is larger, no step selects keys."""

_DIVIDED_BYTES = 256 << 20  # of a model in fp32; what is exact takes twice that
_MOST_PROCESSES = 4  # more gain little, as each runs the prompt through its first program


@dataclass(frozen=True)
class ExportedArtifact:
    """An artifact with the program that its passes start at. Made by :meth:`open`.

    Attributes:
        artifact: checked.
        exported: the program before the first pass.
        model_dir: of the model.
        dummy: whether the weights are random.
        recorded: whether ``exported`` is what the artifact records, and not exported again.
    """

    artifact: Artifact
    exported: Program
    model_dir: Path
    dummy: bool
    recorded: bool = False

    @classmethod
    def open(
        cls,
        path: Path,
        model_dir: Path | None = None,
        dummy: bool = False,
        recorded_export: bool = False,
    ) -> "ExportedArtifact":
        """Open an artifact and export its model again, as this installation does.

        Args:
            path: the artifact.
            model_dir: the model, for an artifact that does not say where it is.
            dummy: take random weights; the model's configuration is enough then.
            recorded_export: start at the exported graphs that the artifact records, where this
                installation wrote them and they can be compared with transformers' model, and do
                not export the model again. For those who compare them.

        Raises:
            ArtifactError: not a sound artifact, or its model is not in the directory it records.
            UserError: an artifact without a model and no ``model_dir``.
        """
        artifact = Artifact.open(path, verify="header")
        manifest = artifact.manifest
        if model_dir is None or manifest.weights.model_dir is not None:
            model_dir = _model_dir(artifact, model_dir, dummy)
        graphs = _recorded_export(artifact) if recorded_export and not dummy else None
        exported, recorded = _exported(model_dir, replace(manifest.compile, records=False), graphs)
        if exported.spec != manifest.model.spec:
            raise UserError(f"{model_dir}: not the model that {path} was compiled from")
        return cls(artifact, exported, model_dir, dummy, recorded)

    def problems(self) -> list[str]:
        """Differences of the model, exported again, from the graphs recorded; sentences."""
        again = build_program(self.model_dir, self.exported.config)
        return list(export_problems(self.artifact, again))

    def recompiled(self) -> "RecompiledArtifact":
        """Run the passes and open the weights.

        Raises:
            CheckpointError: the model's files do not hold what the artifact needs.
            CompileError: the frontend needs what transformers' model has not got.
        """
        layers = self.artifact.manifest.stored_layers
        spec = self.exported.spec
        with frontend_faults_named(self.model_dir, spec, layers):
            source: Parameters = (
                RandomParameters(spec, layers)
                if self.dummy
                else Checkpoint.open(self.model_dir, spec, layers)
            )
        fields = self.artifact, self.exported, self.model_dir, self.dummy, self.recorded
        return RecompiledArtifact(*fields, replay=Replay(self.exported), store=WeightStore(source))


@dataclass(frozen=True, kw_only=True)
class RecompiledArtifact(ExportedArtifact):
    """Artifact and the replay of its compilation, made by :meth:`open`.

    Attributes:
        replay: the passes over ``exported``.
        store: gives the weights.
        sampled: whether ``exported`` and all behind it are of a part of the model.
    """

    replay: Replay
    store: WeightStore
    sampled: bool = False

    @classmethod
    def open(
        cls,
        path: Path,
        model_dir: Path | None = None,
        dummy: bool = False,
        recorded_export: bool = False,
    ) -> "RecompiledArtifact":
        """Open an artifact and compile its model again, as this installation does.

        Arguments and errors are those of :meth:`ExportedArtifact.open` and
        :meth:`ExportedArtifact.recompiled`.
        """
        return ExportedArtifact.open(path, model_dir, dummy, recorded_export).recompiled()

    def on_one_rank(self) -> "RecompiledArtifact":
        """Artifact of the same model and options for one rank, compiled but not written."""
        exported = self.exported.fork(replace(self.exported.config, layout=ONE_RANK))
        compiled = replace(self.artifact.manifest.compile, layout=ONE_RANK)
        manifest = replace(self.artifact.manifest, compile=compiled)
        artifact = replace(self.artifact, manifest=manifest)
        return replace(self, artifact=artifact, exported=exported, replay=Replay(exported))

    def finished(self, block_size: int) -> Program:
        """Finished program of the same model and options with cache blocks of ``block_size``."""
        if self.exported.config.block_size == block_size:
            return self.replay.final
        config = replace(self.exported.config, block_size=block_size, records=False)
        program = self.exported.fork(config)
        run_pipeline(program)
        return program

    @property
    def small(self) -> bool:
        """Whether transformers' model, in fp32, is small enough to be run beside this one."""
        return _is_small(self.exported.spec)

    @property
    def processes(self) -> int:
        """Count of processes to divide checks among at most: each makes weights of its own."""
        if not _is_small(self.exported.spec, _DIVIDED_BYTES):
            return 1
        return min(usable_processes(), _MOST_PROCESSES)

    @property
    def no_reference(self) -> str | None:
        """Reason why the exported program cannot be compared with transformers' model, or None."""
        if self.dummy:
            return "random weights"
        if not self.small:
            return "transformers' model is too large"
        return None if has_reference(self.model_dir) else NO_MODEL

    def problems(self) -> list[str]:
        """Differences of the artifact from what this installation compiles; sentences.

        There are none where it compiles nothing because a pass cannot be run.
        """
        if not self.replay.complete:
            return []
        emitted = emission_problems(self.artifact, self.replay.final, self.store, self.dummy)
        return [*export_problems(self.artifact, self.exported), *emitted]

    def packed_weight_problems(self) -> Iterator[str]:
        """Differences of packed weights from what the plan makes; sentences."""
        packed = self.artifact.manifest.weights.mode == "pack"
        if packed and self.artifact.manifest.target == "cpu":
            yield from weight_problems(self.artifact, self.replay.final, self.store)

    def pass_names(self, asked: Sequence[str]) -> tuple[str, ...]:
        """The passes of that name.

        Raises:
            UserError: no such pass ran; suggests the nearest.
        """
        names = [run.step.name for run in self.replay.runs]
        for name in asked:
            if name not in names:
                raise UserError(f"no pass {name!r} ran{hint(name, names, 'passes:')}")
        return tuple(asked)

    def passes_of_ranks(self) -> tuple[str, ...]:
        """The passes from the first that cuts on; the program in front of it is that of one rank.

        Raises:
            UserError: an artifact of one rank.
        """
        if self.exported.config.layout == ONE_RANK:
            raise UserError(
                f"{self.artifact.path}: compiled for one rank, so there is nothing to compare it "
                "with; --against-unsharded is for artifacts compiled with --tp or --dp"
            )
        steps = [run.step for run in self.replay.runs]
        return tuple(step.name for step in dropwhile(lambda step: not step.cuts, steps))

    def token_ids(self, text: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of a prompt of the user's.

        Raises:
            RequestError: text without a tokenizer, or ids outside the vocabulary.
        """
        tokenizer = load_tokenizer(self.artifact)
        return tuple(token_ids_of("prompt", text, self.exported.spec.vocab_size, tokenizer))

    def prompt(self, text: str | Sequence[int] | None = None, tokens: int | None = None) -> Prompt:
        """A prompt of the user's, or random tokens beyond twice ``index_topk``.

        Args:
            text: a text, or token ids; None for random tokens.
            tokens: how many of these; None for what reaches beyond twice ``index_topk``, where a
                decode step leaves most keys out, and one block, if that is no more than
                :data:`MOST_TOKENS`.

        Raises:
            RequestError: text without a tokenizer, or ids outside the vocabulary.
            UserError: fewer than two tokens, or more than the model takes.
        """
        spec, block = self.exported.spec, self.artifact.manifest.block_size
        limit = spec.max_position_embeddings
        if text is None:
            wanted = max(2 * spec.index_topk + 9, block + 6)
            count = min(wanted, MOST_TOKENS, limit) if tokens is None else tokens
            ids = random_tokens(min(max(count, 0), limit + 1), spec.vocab_size)
        else:
            ids = self.token_ids(text)
        if not 2 <= len(ids) <= limit:
            given = len(ids) if tokens is None else tokens
            raise UserError(f"a prompt must have from 2 to {limit} tokens, not {given}")
        return Prompt.of(ids, spec.index_topk, block, brief=self.sampled)


def _is_small(spec: ModelSpec, limit: int = 2 << 30) -> bool:
    """Whether transformers' model fits into ``limit`` bytes in fp32."""
    parameters = canonical_parameters(spec, range(spec.num_hidden_layers))
    return 4 * sum(math.prod(p.shape) for p in parameters.values()) <= limit


def _recorded_export(artifact: Artifact) -> dict[str, Any] | None:
    """The JSON of the graphs before the first pass, by region; None if they cannot stand in for a
    fresh export: another installation wrote them, or nothing will compare them."""
    manifest = artifact.manifest
    ours = manifest.producer == Producer.current() and _is_small(manifest.model.spec)
    if manifest.exported is None or not ours:
        return None
    return {graph["name"]: graph for graph in artifact.read_json(manifest.exported)["regions"]}


def _exported(
    model_dir: Path, config: CompileConfig, recorded: dict[str, Any] | None
) -> tuple[Program, bool]:
    """The program before the first pass, and whether it is the recorded one."""
    if recorded is not None:
        with contextlib.suppress(ArtifactError):  # exported again, they are whole
            return build_program(model_dir, config, recorded), True
    return build_program(model_dir, config), False


def _model_dir(artifact: Artifact, given: Path | None, dummy: bool) -> Path:
    recorded = artifact.manifest.weights.model_dir
    if recorded is None:
        raise UserError(
            f"{artifact.path}: does not say where its model is, and its passes are run again from "
            "there; name the model with --model-dir"
        )
    if dummy and (Path(given or recorded) / "config.json").is_file():
        return Path(given or recorded)
    return artifact.model_dir(given)
