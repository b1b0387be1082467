"""Sampling next to the model: tokens are chosen on the device, and the host reads them later.

What a request asks of the draw stays in pinned memory that the kernel reads and writes itself, so
an ordinary step costs one launch and one event, and copies nothing. Rows with bias, masks or
penalties are changed apart and sampled again; rows that want log-probabilities are described from
the model's own logits. Neither touches the other rows.

A grammar's bitmask depends on the token before, which the host learns only when the step before is
over. A step with such a row is sampled later than it is launched: when that token is known, while
the model still computes the step's logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.kernels.cuda.sample_tokens import MOST_TOKENS, OPTIONS, sample_tokens
from dsa_compile.kernels.cuda.shipped import NO_KERNELS, ShippedKernels
from dsa_compile.kernels.sampling_layout import MOST_TOP, ROW_LOGPROBS, words
from dsa_compile.runtime.execution.runner import StepInputs, StepTokens
from dsa_compile.runtime.sampling.draw_options import records_of, sample_on_host
from dsa_compile.runtime.sampling.logprobs import read_logprobs, row_logprobs
from dsa_compile.runtime.sampling.option_rows import OptionRows
from dsa_compile.runtime.sampling.sampler import BAD_LOGITS, NOTHING_LEFT, SamplingState
from dsa_compile.runtime.scheduling.step import Failure


class Slot:
    """Pinned memory that the kernels of one step read and write.

    The first R options and tokens are of all rows, from the model's own logits; those behind them
    are of the rows whose logits were changed.
    """

    def __init__(self, rows: int, on_device: bool) -> None:
        size = 2 * rows * OPTIONS.itemsize
        self.options = torch.zeros(size, dtype=torch.uint8, pin_memory=on_device)
        self.records = self.options.numpy().view(OPTIONS)
        self.tokens = torch.zeros(2 * rows, dtype=torch.int64, pin_memory=on_device)
        self.on_host: NDArray[np.int64] = self.tokens.numpy()
        shape = (rows, words(ROW_LOGPROBS))
        self.logprobs = torch.zeros(shape, dtype=torch.int32, pin_memory=on_device)
        self.done = torch.cuda.Event() if on_device else None


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """Tokens that the device is choosing.

    Args:
        slot: takes them.
        count: requests that yield one.
        changed: places of those whose logits were changed.
        described: places of those that want log-probabilities.
        alternatives: how many of the likeliest tokens each of these wants.
    """

    slot: Slot
    count: int
    changed: Sequence[int]
    described: Sequence[int]
    alternatives: Sequence[int]

    def read(self) -> StepTokens:
        """The tokens; waits for the step that makes them."""
        if self.slot.done is not None:
            self.slot.done.synchronize()
        all_tokens = self.slot.on_host
        tokens: list[int] = all_tokens[: self.count].tolist()
        if not self.changed and not self.described and min(tokens, default=0) >= 0:
            return StepTokens([[token] for token in tokens])
        results: list[list[int] | Failure] = [
            Failure(BAD_LOGITS) if token < 0 else [token] for token in tokens
        ]
        start = len(all_tokens) // 2
        behind = all_tokens[start : start + len(self.changed)].tolist()
        for place, token in zip(self.changed, behind, strict=True):
            if tokens[place] >= 0:
                results[place] = Failure(NOTHING_LEFT) if token < 0 else [token]
        records = self.slot.logprobs.numpy()[: len(self.described)]
        chosen = [
            0 if isinstance(result := results[place], Failure) else result[0]
            for place in self.described
        ]
        entries = read_logprobs(records, chosen, self.alternatives)
        logprobs = {
            place: [entry]
            for place, entry in zip(self.described, entries, strict=True)
            if not isinstance(results[place], Failure)
        }
        return StepTokens(results, logprobs)


# One being filled, one on the device, and one to spare.
_SLOTS = 3


class DeviceTokens:
    """Tokens of a step that may still run."""

    def __init__(self, choose: Callable[[], Chosen]) -> None:
        self._choose: Callable[[], Chosen] | None = choose
        self._chosen: Chosen | None = None

    def sample(self) -> None:
        """Launch the sampling, if it was not launched with the step."""
        if self._choose is not None:
            self._chosen = self._choose()
            self._choose = None  # it holds the logits

    def wait(self) -> StepTokens:
        """The tokens; waits for the step that makes them.

        Raises:
            RuntimeError: the device reports an error of this step or of one before it.
        """
        assert self._chosen is not None, "a step is sampled before it is waited for"
        return self._chosen.read()


class DeviceSampler:
    """Chooses tokens for steps that are still to run.

    Agrees with :class:`~dsa_compile.runtime.sampling.sampler.Sampler`, draw for draw, but for the
    last bits of the weights and of log-probabilities.

    Args:
        vocab_size: V.
        last_tokens: int64 ``[R]``, the last token of each row of the scheduler; written here, read
            by the model. On the CPU, tokens are chosen at once.
        shipped_kernels: where the kernel comes from, if it is there.
    """

    def __init__(
        self,
        vocab_size: int,
        last_tokens: Tensor,
        shipped_kernels: ShippedKernels = NO_KERNELS,
    ) -> None:
        self._vocab_size = vocab_size
        self._last_tokens = last_tokens
        self._shipped_kernels = shipped_kernels
        rows = len(last_tokens)
        self._slots = [Slot(rows, last_tokens.is_cuda) for _ in range(_SLOTS)]
        self._next = 0
        self._option_rows = OptionRows(vocab_size, last_tokens)

    def takes(self, states: Sequence[SamplingState]) -> bool:
        """Whether the next tokens of these requests can be chosen here."""
        return self._vocab_size <= MOST_TOKENS and not any(
            state.special and (state.params.logprobs or 0) > MOST_TOP for state in states
        )

    def launch(
        self, logits: Tensor, inputs: StepInputs, options: NDArray[np.void] | None = None
    ) -> DeviceTokens:
        """Choose tokens behind the work that makes the logits, and wait for neither.

        Where a grammar has to know a token of the step in flight, nothing is launched until
        :meth:`DeviceTokens.sample` is called; the logits must stay until then.

        Args:
            logits: ``[Y, V]`` on the device.
            inputs: the step, without drafts; :meth:`takes` its states, of which only those are
                needed that change or describe their logits.
            options: how the tokens are drawn, ``[Y]`` records; None to make them of the states.
        """
        if options is None:
            options = records_of(inputs.rows, inputs.states, inputs.counts)
        special = [place for place, state in enumerate(inputs.states) if state.special]
        tokens = DeviceTokens(partial(self._choose, logits, inputs, options, special))
        if not any(
            inputs.states[place].grammar is not None
            and inputs.counts[place] > inputs.states[place].generated
            for place in special
        ):
            tokens.sample()
        return tokens

    def _choose(
        self,
        logits: Tensor,
        inputs: StepInputs,
        options: NDArray[np.void],
        special: Sequence[int],
    ) -> Chosen:
        slot, rows = self._slot(), inputs.rows
        count = len(rows)
        records = slot.records[:count]
        records[:] = options
        states, counts = inputs.states, inputs.counts
        changed = [place for place in special if states[place].alters_logits(counts[place])]
        wanted = [place for place in special if states[place].params.logprobs is not None]
        if changed:
            again = slot.records[len(slot.records) // 2 :][: len(changed)]
            again[:] = records[changed]
            # Their own logits only tell whether they are sound; the last token is still needed.
            records["temperature"][changed] = 0.0
            records["row"][changed] = -1
        if count:
            with self._shipped_kernels.in_use():
                self._sample(logits, slot, 0)
                self._sample_changed(logits, inputs, changed, slot)
        alternatives = [min(states[i].params.logprobs or 0, self._vocab_size) for i in wanted]
        if wanted:
            self._describe(logits, wanted, [rows[place] for place in wanted], alternatives, slot)
        if slot.done is not None:
            slot.done.record()
        # Only now: a launch that is broken off must not bring the slot of a step in flight nearer.
        self._next = (self._next + 1) % len(self._slots)
        return Chosen(slot, count, changed, wanted, alternatives)

    def _sample_changed(
        self, logits: Tensor, inputs: StepInputs, changed: Sequence[int], slot: Slot
    ) -> None:
        each, start = self._option_rows.most_rows, len(slot.records) // 2
        for first in range(0, len(changed), each):
            rows = self._option_rows.change(logits, inputs, changed[first : first + each])
            self._sample(rows, slot, start + first)

    def _sample(self, logits: Tensor, slot: Slot, start: int) -> None:
        """Sample rows with the options and tokens of the slot from ``start`` on."""
        tokens = slot.tokens[start:]
        if self._last_tokens.device.type == "cpu":
            records = slot.records[start : start + len(logits)]
            sample_on_host(logits, records, self._last_tokens, tokens)
        else:
            options = slot.options[start * OPTIONS.itemsize :]
            sample_tokens(logits, options, self._last_tokens, tokens)

    def _describe(
        self,
        logits: Tensor,
        places: Sequence[int],
        rows: Sequence[int],
        alternatives: Sequence[int],
        slot: Slot,
    ) -> None:
        arrays = self._option_rows.upload(
            {"places": np.array(places, np.int32), "rows": np.array(rows, np.int32)}
        )
        found = row_logprobs(
            logits, arrays["places"], arrays["rows"], self._last_tokens, max(alternatives)
        )
        slot.logprobs[: len(places)].copy_(found, non_blocking=True)

    def _slot(self) -> Slot:
        slot = self._slots[self._next]
        if slot.done is not None:
            slot.done.synchronize()  # at once, but for a step that was given up
        return slot
