"""The runner of a model on one device: steps with k drafts a request, checked in the step behind.

Without drafts, k = 0, a step is the model over its tokens, and each request yields one. With them a
step is three parts::

    deeper drafts    d2 … dk of each request, from the first draft and the state behind it
    the model        over each request's last token and its drafts; tokens are chosen, and kept up
                     to the first that is not its draft
    first drafts     d1 of the next step, and the rows of the draft layer's caches

The last part runs over every token of the step, shifted: at position p it takes the model's state
there and token p + 1. So it fills the draft layer's caches along prompts, and overwrites what
deeper drafts have left, which was made of a draft's states. Rows behind the tokens that are kept
hold nothing of use: the step that computes their positions writes them again.

Deeper drafts are made at the start of the step that checks them: their cache rows are those of
positions which that step computes, so no block is ever held for a draft beyond it.

All of it stays where the tokens are (:mod:`dsa_compile.runtime.execution.draft_rows`), and the host
learns later what was kept. Only requests whose logits their options change or describe have their
tokens chosen on the host, which waits for the step then; so does everything with drafts that the
host looks up.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.execution import BoundCall, run_calls
from dsa_compile.ir.plan import LONG, Plan
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.captured_steps import CapturedSteps, StepParts
from dsa_compile.runtime.execution.draft_inputs import PaddedInputs, fits_padded, ragged_inputs
from dsa_compile.runtime.execution.draft_rows import DraftedRows, RowState, corrected_rows
from dsa_compile.runtime.execution.drafted_tokens import TokenSlots
from dsa_compile.runtime.execution.drafter import Drafter
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.idle_rows import as_long, padded
from dsa_compile.runtime.execution.model_steps import LOGITS, ModelSteps, Values
from dsa_compile.runtime.execution.padded_rows import padded_rows
from dsa_compile.runtime.execution.runner import LaunchedTokens, ReadTokens, StepInputs
from dsa_compile.runtime.execution.step_shape import StepShape
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling.device_sampler import DeviceSampler
from dsa_compile.runtime.sampling.draw_options import Records, records_of, sample_rows
from dsa_compile.runtime.sampling.host_choice import (
    CheckedRows,
    Chosen,
    HostChoice,
    Observer,
    choose_on_host,
)
from dsa_compile.runtime.sampling.sampler import Sampler, SamplingState
from dsa_compile.runtime.scheduling.stats import EAGER, StepKind


@dataclass(frozen=True, slots=True, eq=False)
class OpenStep:
    """A step without its tokens.

    Args:
        inputs: the step; of another rank's requests without states.
        logits: ``[N, V]``, those that the batch wants; with drafts of every row of the grid,
            ``[Y * W, V]``.
        values: of the model's step, by name; empty where nobody looks at them.
        variant: of that step.
        rows: of a step with drafts, W wide.
        drafts: int64 ``[Y, W - 1]``, those that were checked.
    """

    inputs: StepInputs
    logits: Tensor
    values: dict[str, Any] = field(default_factory=dict)
    variant: str = LONG
    rows: DraftedRows | None = None
    drafts: Tensor | None = None

    def checked(self) -> CheckedRows:
        """Rows that the tokens are chosen from; waits for the step."""
        if self.rows is None or self.drafts is None:
            return CheckedRows(self.logits.float().cpu(), [()] * len(self.inputs.rows))
        max_new = torch.tensor(self.inputs.max_new, dtype=torch.int64)
        valid = torch.arange(self.rows.width) < max_new[:, None]
        pairs = zip(self.drafts.tolist(), self.inputs.max_new, strict=True)
        drafts = [tokens[: most - 1] for tokens, most in pairs]
        return CheckedRows(self.logits.float().cpu()[valid.flatten()], drafts)


class ModelRunner(ModelSteps):
    """A :class:`~dsa_compile.runtime.execution.runner.Runner` over an artifact.

    Drafts that the host knows (a batch's ids beside a request's last token) are checked as they
    are; where they are -1, the artifact's draft plans make them.

    Args:
        *args: as for :class:`ModelSteps`.
        num_drafts: the most drafts of a request in a step, k.
        plans: the artifact's plans, if they are to draft.
        force_accept: tokens that a step keeps of a request on average, whatever is right of its
            drafts; None for those that are right.
        **options: as for :class:`ModelSteps`.

    Attributes:
        num_drafts: as given.
        num_lanes: 1.
        observer: called with every step; the host chooses the tokens of all steps then, and waits
            for them. None: not called.
    """

    num_lanes = 1

    def __init__(
        self,
        *args: Any,
        num_drafts: int = 0,
        plans: Mapping[str, Plan] | None = None,
        force_accept: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        rows = self.max_num_seqs
        self.observer: Observer | None = None
        self.num_drafts = num_drafts
        self._per_thousand = None if force_accept is None else round(1000 * force_accept)
        self._host_sampler = Sampler(self.vocab_size)
        self._sampler = DeviceSampler(self.vocab_size, self.token_buffer, self.shipped_kernels)
        self._state = RowState.empty(rows, self.device)
        self._slots = TokenSlots(rows, 1 + num_drafts, self.device)
        self._sizes: GraphPlan | None = None
        self._padded = CapturedSteps(
            StepParts(
                lambda key: PaddedInputs(key.rows, key.tokens_each, key.columns, rows),
                self._padded_step,
                lambda key: 1 + key.tokens_each,
                torch.int64,
                self.device,
                self._ring,
            )
        )
        self._drafter: Drafter | None = None
        if plans is not None:
            self._drafter = Drafter(
                plans, self._regions, self._bound_plan, self._run, self._state, self.block_size
            )

    @property
    def drafter(self) -> Drafter | None:
        """Drafter that runs the artifact's draft plans; None where these do not make the drafts."""
        return self._drafter

    @property
    def rows_ahead(self) -> int:
        """Rows whose tokens are kept on the device; 0 where the host looks drafts up."""
        return 0 if self.num_drafts and self._drafter is None else self.max_num_seqs

    @property
    def overlaps(self) -> bool:
        """Whether the device works while the host goes on."""
        return self.rows_ahead > 0 and self.device.type == "cuda"

    @property
    def step_counts(self) -> Counter[StepKind]:
        """Steps so far by how they ran."""
        return super().step_counts + self._padded.steps

    def samples_ahead(self, states: Sequence[SamplingState]) -> bool:
        """Whether the tokens can be chosen on the device; see :class:`Runner`.

        With drafts, no request may change or describe its logits.
        """
        if not self.rows_ahead or self.observer is not None or not self._sampler.takes(states):
            return False
        return not self.num_drafts or not any(state.special for state in states)

    @torch.inference_mode()
    def capture(self, plan: GraphPlan, keys: Sequence[GraphKey] | None = None) -> None:
        """Capture steps as CUDA graphs; see :class:`ModelSteps`."""
        if not self.num_drafts:
            super().capture(plan, keys)
        if self._drafter is None:
            return  # the host looks up its drafts between steps, which have all sizes
        self.pad_to(plan)
        with self.shipped_kernels.in_use():
            self._padded.capture(plan, keys)

    def drop_graphs(self) -> None:
        """Give captured steps up, and what steps are rounded up to; see :class:`ModelSteps`."""
        super().drop_graphs()
        self._padded.drop()
        self.pad_to(None)

    def without_drafts(self) -> "ModelRunner":
        """A runner of the model's plan alone, over the same weights and caches."""
        return ModelRunner(
            self._manifest,
            self._regions,
            self._weights,
            self.num_blocks,
            self.max_num_seqs,
            deterministic=self._deterministic,
            caches=self.caches,
            shipped_kernels=self.shipped_kernels,
        )

    def pad_to(self, plan: GraphPlan | None) -> None:
        """Round decode steps up to these sizes; None to launch each at its own."""
        self._sizes = plan

    def launch(self, inputs: StepInputs) -> LaunchedTokens:
        """Launch a step, and wait for it where the host chooses its tokens.

        Raises:
            StepError: an op failed, or the GPU did.
        """
        options = records_of(inputs.rows, inputs.states, inputs.counts)
        if self.chooses_tokens(inputs):
            return self.launch_whole(inputs, options)
        step = self.open_step(inputs, options)
        choice = self.choose(inputs, checked := step.checked())
        if self.observer is not None:
            self.observer(checked.logits, checked.drafts, choice.chosen)
        tokens = choice.tokens(self.score(step))
        self.close_step(step, (choice.sampled, choice.kept))
        return ReadTokens(lambda: tokens)

    def chooses_tokens(self, inputs: StepInputs) -> bool:
        """Whether the tokens of a step are chosen on the device, and not by the host."""
        if not self.num_drafts:
            return inputs.ahead
        return inputs.prompt is None and self.samples_ahead(inputs.states)

    def launch_whole(
        self, inputs: StepInputs, options: Records, lanes: StepShape | None = None
    ) -> LaunchedTokens:
        """Launch a step that :meth:`chooses_tokens`.

        Args:
            inputs: the step; states are not needed, but of requests whose logits they change.
            options: how its tokens are drawn, ``[Y]`` records.
            lanes: the shape that the step has on all lanes, which launch theirs with the same one;
                None for that of the step.
        """
        if not self.num_drafts:
            logits = self.forward(_as_long(inputs.batch, lanes))
            return self._sampler.launch(logits, inputs, options)
        with torch.inference_mode(), self.shipped_kernels.in_use():
            variant = self._variant(inputs)
            if (key := self._padded_size(inputs, variant, lanes)) is not None:
                return self._slots.send(*self._padded.launch(key, inputs, options))
            rows, drafts, values = self._run_step(inputs, options, variant, lanes)
            return self._slots.send(self._choose_and_draft(rows, drafts, values, variant), None)

    def open_step(
        self, inputs: StepInputs, options: Records, lanes: StepShape | None = None
    ) -> OpenStep:
        """Launch a step up to its logits; the arguments are those of :meth:`launch_whole`."""
        if not self.num_drafts:
            batch = _as_long(inputs.batch, lanes)
            if inputs.prompt is None:
                return OpenStep(inputs, self.forward(batch))
            return OpenStep(inputs, *self.values_of(batch), self.variant_of(batch))
        with torch.inference_mode(), self.shipped_kernels.in_use():
            variant = self._variant(inputs)
            rows, drafts, values = self._run_step(inputs, options, variant, lanes)
        return OpenStep(inputs, values[LOGITS], values, variant, rows, drafts)

    def choose(self, inputs: StepInputs, checked: CheckedRows) -> HostChoice:
        """Choose the tokens of a step on the host."""
        return choose_on_host(self._host_sampler, inputs, checked, self._per_thousand)

    def score(self, step: OpenStep) -> Sequence[TokenLogprobs]:
        """Log-probabilities of the prompt tokens whose logits a step wants, an entry a row."""
        if step.inputs.prompt is None:
            return ()
        return self.score_prompt(step.values, step.variant, step.inputs.prompt)

    @torch.inference_mode()
    def close_step(self, step: OpenStep, chosen: Chosen) -> None:
        """Keep what was chosen of a step, and make the first drafts of the next one.

        Args:
            step: the newest; nothing follows it where the host looks drafts up.
            chosen: tokens of its requests, W of each, and how many count.
        """
        if self._drafter is None:
            return
        assert step.rows is not None, "of a step with drafts"
        with self.shipped_kernels.in_use():
            sent = self._upload(dict(zip(("sampled", "kept"), chosen, strict=True)))
            settled = step.rows.settle_known(self._state, sent["sampled"], sent["kept"])
            self._drafter.begin(step.rows, step.values, step.variant, settled)

    def _variant(self, inputs: StepInputs) -> str:
        alike = self._deterministic and fits_padded(inputs)
        return LONG if alike else self.variant_of(inputs.batch)

    def _padded_size(
        self, inputs: StepInputs, variant: str, lanes: StepShape | None
    ) -> GraphKey | None:
        """The size to which a step is rounded up, of one number of rows on all lanes; None if it
        is launched as it is."""
        shape = lanes or StepShape.of([inputs])
        if not shape.even:
            return None
        key = None
        if self._sizes is not None:
            columns = inputs.batch.block_tables.shape[1]
            key = self._sizes.choose_size(shape.requests, shape.width, columns, variant)
        if key is None and self._deterministic:
            key = GraphKey(LONG, shape.requests, self._all_columns, shape.width)
        return key

    @property
    def _all_columns(self) -> int:
        return -(-self.max_model_len // self.block_size)

    def _padded_step(self, step: dict[str, Tensor], variant: str) -> Tensor:
        rows = padded_rows(step, self._state, self.block_size)
        drafts, values = self._drafts_and_model(rows, variant, flat=True)
        return self._choose_and_draft(rows, drafts, values, variant)

    def _run_step(
        self, inputs: StepInputs, options: Records, variant: str, lanes: StepShape | None
    ) -> tuple[DraftedRows, Tensor, Values]:
        """A step up to its logits: its rows, their drafts, and every value of the model."""
        self._eager_steps[StepKind(EAGER, variant)] += 1
        if lanes is not None:
            inputs = replace(inputs, batch=padded(inputs.batch, lanes.tokens))
        step = self._upload(ragged_inputs(inputs, options, self.max_num_seqs))
        flat = self._deterministic and fits_padded(inputs)
        if flat:
            step["every_row"] = torch.arange(inputs.batch.num_tokens, device=self.device)
            step["cu_seqlens"] = torch.arange(
                inputs.batch.num_tokens + 1, dtype=torch.int32, device=self.device
            )
        rows = replace(corrected_rows(step, self._state, self.block_size, flat=flat), lanes=lanes)
        if self._wait is not None:  # for the first op not to be blamed for what was before it
            self._wait()
        drafts, values = self._drafts_and_model(rows, variant, flat=flat)
        if flat:
            values[LOGITS] = values[LOGITS][rows.places.flatten()]
        return rows, drafts, values

    def _drafts_and_model(
        self, rows: DraftedRows, variant: str, *, flat: bool
    ) -> tuple[Tensor, Values]:
        if self._drafter is not None:
            drafts = self._drafter.drafts_of(rows, variant)
        else:
            drafts = rows.values["input_ids"][rows.places[:, 1:]]
        values: Values = {**rows.values, "input_ids": rows.with_drafts(drafts)}
        if flat and self._deterministic:
            carried = self._drafter.carried if self._drafter is not None else ()
            values |= self._run_alike(values, [*carried, LOGITS])
        else:
            self._run(self._calls, self._plan, values, variant)
        return drafts, values

    def _choose_and_draft(
        self, rows: DraftedRows, drafts: Tensor, values: Values, variant: str
    ) -> Tensor:
        """The outcome of a step, int64 ``[Y, 1 + W]``: how many tokens count, and the tokens."""
        assert self._drafter is not None, "see samples_ahead"
        sampled = sample_rows(values[LOGITS], rows.grid_options()).view(rows.places.shape)
        settled = rows.settle(self._state, sampled, drafts, self._per_thousand)
        self._drafter.begin(rows, values, variant, settled)
        return settled.outcome

    def _run(
        self, calls: Mapping[str, Sequence[BoundCall]], plan: Plan, values: Values, variant: str
    ) -> None:
        """Run a plan; without rows of logits that are wanted, all but its head."""
        if len(values["logit_rows"]):
            run_calls(calls[variant], values)
            return
        run_calls(calls[variant][: len(plan.writing)], values)
        values[LOGITS] = self._no_logits()

    def _bound_plan(self, plan: Plan) -> Mapping[str, Sequence[BoundCall]]:
        return self._bound(self._regions, plan)


def _as_long(batch: Batch, lanes: StepShape | None) -> Batch:
    return batch if lanes is None else as_long(batch, lanes.tokens)
