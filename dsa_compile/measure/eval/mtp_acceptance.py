"""Acceptance of drafts: how many drafts of a model's own draft layer it accepts, greedily.

The draft layer is given the model's own states and tokens (teacher forcing), and its drafts are
compared with the model's tokens: see :mod:`dsa_compile.measure.eval.draft_chains`.

States go from draft to draft after the norm of the layer's head. Such states are what ``hnorm`` was
trained on, and architectures do not differ in it: GLM-5 wants it (vLLM pull requests 46075, 47448),
and DeepSeek as well, for which vLLM once handed on the states before that norm: with DeepSeek-R1,
three drafts, 64.6 % of drafts are accepted instead of 61.4 (ROCm/ATOM pull request 1764). The
trained example agrees, see :file:`docs/evaluation.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.measure.eval.draft_chains import Chain, DraftChains
from dsa_compile.measure.eval.hf_agreement import generate_greedily
from dsa_compile.measure.eval.progress import Tick, ignore
from dsa_compile.runtime.execution.runner import Runner

TEXT, GENERATED = "text", "generated"
ENGINE, PREDICTED = "an engine's steps", "predicted for these"


@dataclass(frozen=True)
class Acceptance:
    """Drafts of one depth.

    Attributes:
        source: ``text``: after every token of the text, is the first draft the model's likeliest
            next token. ``generated``: along the model's own greedy continuation of the text; a
            draft counts if it and all before it in its chain are right, so the shares of all
            depths sum to the drafted tokens accepted at each step. :data:`ENGINE`: likewise, of
            the steps that an engine made, and :data:`PREDICTED`: what should have come of them.
        depth: 1 for the first drafted token.
        drafts: chains drafted.
        accepted: of them, right down to this depth.
        text: the file that prompts are from; empty for all.
    """

    source: str
    depth: int
    drafts: int
    accepted: int
    text: str = ""

    @property
    def share(self) -> float:
        """Accepted over drafted."""
        return self.accepted / self.drafts


def measure_acceptance(
    drafts: DraftChains,
    runner: Runner,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    generate: int,
    depth: int,
    tick: Tick = ignore,
) -> list[Acceptance]:
    """Depth 1 on texts, every depth along greedy continuations of prompts.

    Args:
        drafts: of an artifact.
        runner: of the same artifact.
        texts: token ids, at least 3 each.
        prompts: token ids.
        generate: tokens generated after each prompt, more than ``depth``.
        depth: drafts of a chain.
        tick: called as the measurement goes on.
    """
    accepted, count = 0, 0
    for done, text in enumerate(texts):
        logits, first = drafts.along(tuple(text))
        guess = first["logits"][:-1].argmax(-1)
        accepted += int((guess == logits[1:].argmax(-1)).sum())
        count += len(guess)
        tick((done + 1) / (len(texts) + len(prompts)))
    results = [Acceptance(TEXT, 1, count, accepted)] if count else []

    counts = torch.zeros(depth, dtype=torch.long)
    chains = 0
    continuations = generate_greedily(runner, prompts, generate)
    for done, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        right, _ = chain_matches(drafts, prompt, continuation, depth)
        counts += right.cumprod(0).sum(1)
        chains += right.shape[1]
        tick((len(texts) + done + 1) / (len(texts) + len(prompts)))
    return results + [
        Acceptance(GENERATED, depth, chains, count)
        for depth, count in enumerate(counts.tolist(), start=1)
        if chains
    ]


def chain_matches(
    drafts: DraftChains, prompt: Sequence[int], continuation: Sequence[int], depth: int
) -> tuple[Tensor, list[Chain]]:
    """Chains of drafts, one from each token of a continuation.

    Returns:
        Which drafts equal the continuation, int64 [depth, C], and the chains.
    """
    tokens = torch.tensor([*prompt, *continuation])
    # the last chain's last draft is for the last token
    ends = range(len(prompt), len(tokens) - depth)
    found = drafts.chains(tuple(tokens.tolist()), ends, depth)
    made = torch.stack([found[end].logits.argmax(-1).cpu() for end in ends], 1)
    wanted = torch.stack([tokens[end + 1 : end + 1 + depth] for end in ends], 1)
    return (made == wanted).long(), [found[end] for end in ends]
