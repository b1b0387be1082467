"""A model of the runner's contract without a network: tokens are hashes of what the caches hold.

Each cache row is a hash of its token, its position and the row before it, read back from the page;
the next token is a hash of all rows of both caches up to it. A wrong block, a stale page, a missing
write or a prefix taken for another changes the tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.runner import LaunchedTokens, StepInputs
from dsa_compile.runtime.sampling.host_choice import known_tokens
from dsa_compile.runtime.sampling.logprobs import token_logprobs
from dsa_compile.runtime.sampling.sampler import Sampler, SamplingState
from dsa_compile.runtime.scheduling.stats import EAGER, StepKind

_MASK = (1 << 64) - 1
_SALTS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # latent, index
_NO_ROW = 0x27D4EB2F165667C5


def _mix(above: int, token: int, position: int, salt: int) -> int:
    x = (above * 0x5851F42D4C957F2D + token * 0x14057B7EF767814F + position + salt) & _MASK
    x ^= x >> 29
    x = x * 0xBF58476D1CE4E5B9 & _MASK
    return x ^ x >> 32


def _choose(total: int, vocab_size: int) -> int:
    return (_mix(total, 0, 0, 1) >> 16) % vocab_size


def reference_tokens(
    prompt: Sequence[int], max_tokens: int, vocab_size: int, eos_ids: Sequence[int] = ()
) -> list[int]:
    """The tokens that a :class:`HashRunner` gives for ``prompt``, computed without caches."""
    tokens, total, rows = list(prompt), 0, [_NO_ROW] * 2
    generated: list[int] = []
    for position in range(len(prompt) + max_tokens - 1):
        rows = [_mix(r, tokens[position], position, s) for r, s in zip(rows, _SALTS, strict=True)]
        total = (total + sum(rows)) & _MASK
        if position >= len(prompt) - 1:
            generated.append(_choose(total, vocab_size))
            tokens.append(generated[-1])
            if generated[-1] in eos_ids:
                break
    return generated


class HashRunner:
    """A :class:`dsa_compile.runtime.execution.runner.Runner` over two integer caches.

    Its tokens are chosen on the host, so no step is launched ahead.

    Args:
        num_blocks: blocks of each cache.
        block_size: rows of a block.
        vocab_size: V.
        max_model_len: longest request.
        eos_token_ids: end tokens.
        nan_token: a request whose context ends with this token gets NaN logits.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 64,
        max_model_len: int = 1 << 20,
        eos_token_ids: tuple[int, ...] = (),
        nan_token: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.nan_token = nan_token
        rows = (2, num_blocks * block_size)
        # Poison: a row that is read before it is written changes the tokens.
        self.caches = np.random.default_rng(0).integers(0, _MASK, rows, np.uint64)
        self.steps: list[Batch] = []
        self.num_drafts = 0
        self.num_lanes = 1
        self.rows_ahead = 0
        self.overlaps = False
        self._sampler = Sampler(vocab_size)

    @property
    def step_counts(self) -> dict[StepKind, int]:
        """Steps launched so far, all without graphs."""
        return {StepKind(EAGER, "long"): len(self.steps)}

    def samples_ahead(self, states: Sequence[SamplingState]) -> bool:
        """False: the host chooses the tokens."""
        return False

    def launch(self, inputs: StepInputs) -> LaunchedTokens:
        """Run a step, and choose its tokens on the host."""
        if inputs.prompt is None:
            return known_tokens(self._sampler, self.execute(inputs.batch), inputs)
        scored, prompt = len(inputs.prompt.rows), inputs.prompt
        rows = np.concatenate([prompt.rows, inputs.batch.logit_rows])
        logits = self.execute(replace(inputs.batch, logit_rows=rows))
        targets = torch.from_numpy(prompt.targets)
        entries = token_logprobs(logits[:scored], targets, prompt.alternatives)
        return known_tokens(self._sampler, logits[scored:], inputs, entries)

    def lose_page(self, cache: int, block: int) -> None:
        """Overwrite a block's page of the latent (0) or index (1) cache with poison."""
        start = block * self.block_size
        self.caches[cache, start : start + self.block_size] ^= np.uint64(0xDEADBEEFCAFEF00D)

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run a step; fp32 logits ``[N, V]``."""
        return self.logits(batch, self.sums(batch))

    def sums(self, batch: Batch) -> list[int]:
        """Write a step's rows; for each token that wants logits the sum of all rows up to it."""
        self.steps.append(batch)
        written = batch.slot_mapping[batch.slot_mapping >= 0]
        assert len(np.unique(written)) == len(written), "two tokens write one row"
        bounds, wanted = batch.cu_seqlens.tolist(), set(batch.logit_rows.tolist())
        sums: dict[int, int] = {}
        for request in range(batch.num_requests):
            rows = self._rows(batch, request)
            for token in range(bounds[request], bounds[request + 1]):
                self._write(batch, token, rows)
                if token in wanted:
                    before = rows[: int(batch.positions[token]) + 1]
                    sums[token] = int(self.caches[:, before].sum(dtype=np.uint64))
        return [sums[token] for token in batch.logit_rows.tolist()]

    def logits(self, batch: Batch, sums: Sequence[int]) -> torch.Tensor:
        """The logits of a step, fp32 ``[N, V]``, from its sums."""
        logits = torch.zeros(len(sums), self.vocab_size)
        for row, total in enumerate(sums):
            logits[row, _choose(total, self.vocab_size)] = 10.0
        if self.nan_token is not None:
            logits[torch.from_numpy(batch.input_ids[batch.logit_rows] == self.nan_token)] = np.nan
        return logits

    def _rows(self, batch: Batch, request: int) -> NDArray[np.int64]:
        table = batch.block_tables[request].astype(np.int64)
        rows = table[:, None] * self.block_size + np.arange(self.block_size)
        return np.where(table[:, None] < 0, -1, rows).ravel()

    def _write(self, batch: Batch, token: int, rows: NDArray[np.int64]) -> None:
        slot = int(batch.slot_mapping[token])
        if slot < 0:
            return
        position, token_id = int(batch.positions[token]), int(batch.input_ids[token])
        for cache, salt in enumerate(_SALTS):
            above = int(self.caches[cache, rows[position - 1]]) if position else _NO_ROW
            self.caches[cache, slot] = _mix(above, token_id, position, salt)
