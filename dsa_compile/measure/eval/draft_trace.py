"""Drafts along one greedy answer, position by position, beside the tokens that the model chose."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.errors import UserError
from dsa_compile.runtime.engine import Engine
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.loading.drafts import drafts_of
from dsa_compile.runtime.loading.load_parts import load_parts
from dsa_compile.runtime.requests.outputs import DraftCounts
from dsa_compile.runtime.requests.prompts import Prompt, token_ids_of
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.sampling.sampler import SampledToken


@dataclass(frozen=True)
class TracedToken:
    """A token of an answer.

    Attributes:
        position: in the sequence, from 0 for the first token of the prompt.
        step: that yielded it, from 0.
        depth: of its draft, 1 for the first of a step; 0 where nothing was drafted.
        token: what the model chose.
        draft: what was drafted, or None.
        accepted: whether they are the same.
        rival: the draft where it is another token, else the likeliest other token.
        margin: the token's logit above that of ``rival``.
    """

    position: int
    step: int
    depth: int
    token: int
    draft: int | None
    accepted: bool
    rival: int
    margin: float


@dataclass(frozen=True)
class DraftTrace:
    """Drafts along an answer.

    Attributes:
        method: ``mtp`` or ``ngram``.
        num_drafts: the most of a step.
        tokens: of the answer, in order.
        drafted: drafts that steps checked, by depth, the first draft of a step first.
        accepted: of these, those that were right and all before them.
        steps: that yielded tokens, the prompt's included.
        texts: of tokens and rivals, by id; empty without a tokenizer.
    """

    method: str
    num_drafts: int
    tokens: list[TracedToken]
    drafted: list[int]
    accepted: list[int]
    steps: int
    texts: dict[int, str]

    @property
    def accepted_length(self) -> float:
        """Tokens of a step that checked drafts, on average; 1 without any."""
        return 1 + sum(self.accepted) / self.drafted[0] if self.drafted else 1.0


def trace_drafts(
    path: Path,
    prompt: Prompt,
    max_tokens: int,
    *,
    draft: str | None = None,
    num_speculative_tokens: int | None = None,
    model_dir: Path | None = None,
) -> DraftTrace:
    """Continue a prompt greedily, and record every draft that is checked.

    Args:
        path: of the artifact.
        prompt: a text or token ids.
        max_tokens: of the answer, >= 1.
        draft: ``mtp`` or ``ngram``; None for ``mtp``.
        num_speculative_tokens: 1 to 4; None as an engine does.
        model_dir: where the model's weights are, if they moved.

    Raises:
        UserError: the artifact cannot draft so, is for several ranks, or the prompt cannot be run.
    """
    if num_speculative_tokens == 0:
        raise UserError("--num-speculative-tokens 0: nothing would be drafted; give 1 to 4")
    method = draft or "mtp"
    options = EngineOptions(
        max_num_seqs=1,
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=True,
        draft=method,
        num_speculative_tokens=num_speculative_tokens,
        model_dir=model_dir,
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    manifest = open_manifest(path)
    if (ranks := manifest.compile.layout.world) > 1:
        raise UserError(
            f"{path} is for {ranks} ranks, and drafts are traced of one; compile it without "
            "--tp, --dp and --ep"
        )
    drafts_of(path, manifest, options)  # before the weights are read
    parts = load_parts(path, options)
    runner, tokenizer = parts["runner"], parts["tokenizer"]
    assert isinstance(runner, ModelRunner), "of one rank"
    tokens = token_ids_of("draft", prompt, runner.vocab_size, tokenizer)
    recorder = _Recorder(len(tokens))
    runner.observer = recorder
    config = parts["generation_config"]
    with Engine(runner, options, tokenizer, generation_config=config) as engine:
        (output,) = engine.generate([tokens], params)
    if output.error is not None:
        raise UserError(f"{path}: the answer failed: {output.error}")
    return DraftTrace(
        method,
        runner.num_drafts,
        recorder.tokens,
        recorder.counts.drafted,
        recorder.counts.accepted,
        recorder.steps,
        _texts(recorder.tokens, tokenizer),
    )


def _texts(tokens: Sequence[TracedToken], tokenizer: Any) -> dict[int, str]:
    if tokenizer is None:
        return {}
    ids = {each for token in tokens for each in (token.token, token.rival)}
    return {each: tokenizer.decode([each], skip_special_tokens=False) for each in sorted(ids)}


class _Recorder:
    """Keeps what each step of one request checked."""

    def __init__(self, position: int) -> None:
        self.counts = DraftCounts()
        self.tokens: list[TracedToken] = []
        self.steps = 0
        self._position = position

    def __call__(
        self,
        logits: Tensor,
        drafts: Sequence[Sequence[int]],
        chosen: Sequence[Sequence[SampledToken]],
    ) -> None:
        if not chosen:
            return  # a part of the prompt
        ((guesses,), (tokens,)) = drafts, chosen
        for place, sampled in enumerate(tokens):
            draft = guesses[place] if place < len(guesses) else None
            self._add(logits[place], place + 1, sampled.token_id, draft)
        if guesses:
            self.counts.add(len(guesses), len(tokens) - 1)
        self.steps += 1

    def _add(self, logits: Tensor, depth: int, token: int, draft: int | None) -> None:
        best, second = logits.topk(2).indices.tolist()
        other: int = second if best == token else best
        rival = other if draft is None or draft == token else draft
        self.tokens.append(
            TracedToken(
                position=self._position + len(self.tokens),
                step=self.steps,
                depth=0 if draft is None else depth,
                token=token,
                draft=draft,
                accepted=draft == token,
                rival=rival,
                margin=float(logits[token] - logits[rival]),
            )
        )
