"""``load_parts``: an artifact's runner, tokenizer, chat format and generation config."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from dsa_compile.artifact.acceptance import AcceptanceRecord
from dsa_compile.artifact.reader import Artifact
from dsa_compile.artifact.tokenizer_files import tokenizer_end_token
from dsa_compile.chat import ChatFormat, chat_format
from dsa_compile.facts.generation_config import FILE
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.loading.drafts import drafts_of
from dsa_compile.runtime.loading.load_runner import load_runner
from dsa_compile.runtime.ranks.group import RankGroup, load_ranks
from dsa_compile.runtime.ranks.replay import load_replayed
from dsa_compile.runtime.ranks.torchrun import end_as_follower
from dsa_compile.runtime.ranks.torchrun_environment import started_rank
from dsa_compile.runtime.requests.generation_config import GenerationConfig
from dsa_compile.runtime.requests.prompts import load_tokenizer


def load_parts(path: Path, options: EngineOptions) -> dict[str, Any]:
    """Load an artifact; the arguments of a :class:`StepEngine` over it but its options.

    In a process that ``torchrun`` has started as another rank than the first, it does not return:
    the process runs the steps of the first rank, and ends with it.

    Raises:
        ArtifactError: as :func:`load_runner`, or a file of the tokenizer is malformed.
        UserError: as :func:`load_runner`.
    """
    # Before the weights: those of a large model take minutes.
    artifact = Artifact.open(path, "header", digest=options.digest)
    layout = artifact.manifest.compile.layout
    replayed = options.collectives == "replay"
    started = started_rank()
    if started is not None and started.rank and layout.world > 1 and not replayed:
        end_as_follower(started)
    tokenizer = None if options.skip_tokenizer_init else load_tokenizer(artifact)
    config = GenerationConfig.parse(
        artifact.tokenizer_bytes(FILE), str(artifact.path / "tokenizer" / FILE)
    )
    if not (config.eos_token_ids or artifact.manifest.model.spec.eos_token_ids):
        token = tokenizer_end_token(artifact.tokenizer_bytes)
        config = replace(config, eos_token_ids=() if token is None else (token,))
    of_this = replace(
        options,
        digest=artifact.manifest.digest,  # the one that the tokenizer is of
        shipped_kernels=options.runs_shipped_kernels,
    )
    manifest = artifact.manifest
    acceptance = None
    if drafts_of(path, manifest, options).planned and options.load_format != "dummy":
        acceptance = AcceptanceRecord.read(path, manifest.digest)
    runner: ModelRunner | RankGroup
    if replayed:
        experts = manifest.model.spec.n_routed_experts
        runner = load_replayed(path, manifest.target, of_this, layout, experts)
    elif layout.world == 1:
        runner = load_runner(path, of_this)
    else:
        runner = load_ranks(path, manifest.target, of_this, layout)
    alone = f", projected: rank {options.rank} of {layout.world} alone" if replayed else ""
    place = f"target {manifest.target}, recipe {manifest.recipe}, on {runner.device}{alone}"
    return {
        "runner": runner,
        "tokenizer": tokenizer,
        "generation_config": config,
        "chat_format": cache(partial(_chat_format, artifact)),
        "vocabulary": cache(partial(load_tokenizer, artifact)),
        "acceptance": acceptance,
        "expert_counts": runner.expert_counts,
        "name": f"{path} ({place})",
    }


def _chat_format(artifact: Artifact) -> ChatFormat | None:
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        artifact.tokenizer_bytes(name)  # they are still the ones compiled
    return chat_format(artifact.path / "tokenizer", artifact.manifest.model.spec.model_type)
