"""Acceptance of drafts: how many tokens of the MTP module the model accepts, greedily.

The measure is a plain loop over the reference ops, not speculative decoding itself: the
multi-token-prediction (MTP) module is given the model's own states (teacher forcing), and its
drafts are compared with the model's tokens. From the state at position i and token i + 1 the
module drafts token i + 2; its own output and its draft take their places for the next depth, as
in serving engines.

States are taken after the final norm on both sides, the module's own between depths too. Such
states are what ``hnorm`` was trained on, and architectures do not differ in it: GLM-5 wants it
(vLLM pull requests 46075, 47448), and DeepSeek as well, for which vLLM once handed on the states
before that norm: with DeepSeek-R1, three drafts, 64.6 % of drafts are accepted instead of 61.4
(ROCm/ATOM pull request 1764). The trained example agrees, see :file:`docs/evaluation.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsa_compile.measure.eval.constants import Rope, attention_scale
from dsa_compile.measure.eval.decoder_layer import DecoderLayer, Rows
from dsa_compile.measure.eval.hf_agreement import generate_greedily
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.measure.eval.mtp_weights import load_mtp
from dsa_compile.measure.eval.probe import ProbeRunner
from dsa_compile.measure.eval.progress import Tick, ignore
from dsa_compile.ops.mlp import embedding, linear
from dsa_compile.ops.norm import rms_norm
from dsa_compile.weights.checkpoint import Checkpoint

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


class Drafter:
    """The MTP module over one sequence.

    Args:
        loaded: the artifact, for geometry, frequencies and dtype.
        max_tokens: longest sequence.
        depth: drafts in a chain.
        shared_selection: whether deeper drafts attend to the keys that the first of their chain
            selected, which are none of the chain's own; None for what the model's configuration
            says.

    Raises:
        UserError: the model has no MTP module, or its weights cannot be had.
    """

    def __init__(
        self,
        loaded: LoadedArtifact,
        max_tokens: int,
        depth: int,
        shared_selection: bool | None = None,
    ) -> None:
        spec = loaded.spec
        dtype: torch.dtype = getattr(torch, loaded.manifest.dtype)
        self.depth = depth
        self._eps = spec.rms_norm_eps
        self._weights = load_mtp(loaded.model_dir, spec, dtype)
        self._shared = spec.shared_draft_selection if shared_selection is None else shared_selection
        self._selected: Tensor | None = None
        rows = max_tokens * depth
        self._layer = DecoderLayer(
            spec, self._weights, Rope.of(loaded), attention_scale(loaded), rows
        )

    def first(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts of depth 1 at all positions of a sequence.

        Args:
            states: [n, H], the model's at positions 0 to n - 1, after its final norm.
            tokens: int64 [n], those at positions 1 to n.

        Returns:
            Drafted tokens int64 [n], for positions 2 to n + 1, and the module's states [n, H].
        """
        drafts, after, selected = self._step(states, tokens, Rows.sequence(len(tokens)))
        self._selected = selected if self._shared else None
        return drafts, after

    def deeper(
        self, starts: Tensor, length: int, depth: int, states: Tensor, drafts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Drafts of ``depth`` >= 2 of the chains that started at positions ``starts``.

        Call for depths in order, after :meth:`first` on a sequence of ``length``.

        Args:
            starts: int64 [C], positions of the states that the chains started from.
            length: n of :meth:`first`.
            depth: of the drafts to make.
            states: [C, H], the module's at the depth before.
            drafts: int64 [C], made at the depth before.

        Returns:
            As :meth:`first`, [C].
        """
        count = len(starts)
        chain = torch.arange(count)
        columns = torch.arange(int(starts.max()) + depth)
        # up to its start a chain sees the sequence's rows, then its own
        ahead = columns - starts.unsqueeze(1) - 1
        own = length + ahead * count + chain.unsqueeze(1)
        tables = torch.where(ahead < 0, columns, torch.where(ahead < depth - 1, own, -1))
        rows = Rows(
            positions=starts + depth - 1,
            slots=length + (depth - 2) * count + chain,
            tables=tables.int(),
            cu_seqlens=torch.arange(count + 1, dtype=torch.int32),
            context_lens=(starts + depth).int(),
        )
        selected = None if self._selected is None else self._selected[starts]
        return self._step(states, drafts, rows, selected)[:2]

    def _step(
        self, states: Tensor, tokens: Tensor, rows: Rows, selected: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        w, eps = self._weights, self._eps
        embedded = rms_norm(embedding(tokens, w["embed_tokens.weight"]), w["enorm.weight"], eps)
        joined = torch.cat((embedded, rms_norm(states, w["hnorm.weight"], eps)), -1)
        hidden, chosen = self._layer(linear(joined, w["eh_proj.weight"]), rows, selected)
        after = rms_norm(hidden, w["shared_head.norm.weight"], eps)
        drafts = linear(after, w["shared_head.head.weight"]).float().argmax(-1)
        return drafts, self._carried(hidden, after), chosen

    def _carried(self, hidden: Tensor, after: Tensor) -> Tensor:
        """States that the next depth takes: those after the norm of the module's head."""
        return after


class FinalNorm:
    """Gives the states that head and MTP module take: the residual stream after the final norm."""

    def __init__(self, loaded: LoadedArtifact) -> None:
        checkpoint = Checkpoint.open(
            loaded.model_dir, loaded.spec, range(loaded.spec.num_hidden_layers)
        )
        self._eps = loaded.spec.rms_norm_eps
        self._weight = torch.empty(
            loaded.spec.hidden_size, dtype=getattr(torch, loaded.manifest.dtype)
        )
        checkpoint.read_into("model.norm.weight", self._weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        return rms_norm(hidden, self._weight, self._eps)


@torch.inference_mode()
def measure_acceptance(
    runner: ProbeRunner,
    drafter: Drafter,
    norm: FinalNorm,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[Sequence[int]],
    generate: int,
    tick: Tick = ignore,
) -> list[Acceptance]:
    """Depth 1 on texts, every depth along greedy continuations of prompts.

    Args:
        runner: of the artifact.
        drafter: over the same model.
        norm: of the same model.
        texts: token ids, at least 3 each.
        prompts: token ids.
        generate: tokens generated after each prompt, more than the drafter's depth.
        tick: called as the measurement goes on.
    """
    accepted, drafts = 0, 0
    for done, text in enumerate(texts):
        trace = runner.trace(text)
        guess, _ = drafter.first(norm(trace.hidden[-1])[:-1], torch.tensor(text[1:]))
        accepted += int((guess == trace.logits.argmax(-1)[1:]).sum())
        drafts += len(guess)
        tick((done + 1) / (len(texts) + len(prompts)))
    results = [Acceptance(TEXT, 1, drafts, accepted)] if drafts else []

    counts = torch.zeros(drafter.depth, dtype=torch.long)
    chains = 0
    continuations = generate_greedily(runner, prompts, generate)
    for done, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        right, _ = chain_matches(runner, drafter, norm, prompt, continuation)
        counts += right.cumprod(0).sum(1)
        chains += right.shape[1]
        tick((len(texts) + done + 1) / (len(texts) + len(prompts)))
    return results + [
        Acceptance(GENERATED, depth, chains, count)
        for depth, count in enumerate(counts.tolist(), start=1)
        if chains
    ]


def chain_matches(
    runner: ProbeRunner,
    drafter: Drafter,
    norm: FinalNorm,
    prompt: Sequence[int],
    continuation: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Chains of drafts, one from each token of a continuation.

    Returns:
        Which drafts equal the continuation, int64 [depth, C], and the module's states behind them,
        [depth, C, H].
    """
    tokens = torch.tensor([*prompt, *continuation])
    # the last chain's last draft is for the last token
    starts = torch.arange(len(prompt) - 1, len(tokens) - 1 - drafter.depth)
    states = norm(runner.trace(tokens.tolist()).hidden[-1])[:-1]
    drafts, after = drafter.first(states, tokens[1:])
    drafts, after = drafts[starts], after[starts]
    right, by_depth = [drafts == tokens[starts + 2]], [after]
    for depth in range(2, drafter.depth + 1):
        drafts, after = drafter.deeper(starts, len(states), depth, after, drafts)
        right.append(drafts == tokens[starts + 1 + depth])
        by_depth.append(after)
    return torch.stack(right).long(), torch.stack(by_depth)
