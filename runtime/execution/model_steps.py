"""Run an artifact's graphs over paged caches."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.artifact.manifest import Manifest
from dsa_compile.ir.execution import BoundCall, run_calls
from dsa_compile.ir.plan import LONG, MODEL, SHORT, Plan, for_prompts
from dsa_compile.ir.region import Region
from dsa_compile.kernels.cuda.shipped import NO_KERNELS, ShippedKernels
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.bound_calls import bound_calls
from dsa_compile.runtime.execution.captured_steps import CapturedSteps, StepParts
from dsa_compile.runtime.execution.devices import device_of
from dsa_compile.runtime.execution.expert_counts import counts_of
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.pinned_staging import StagingRing
from dsa_compile.runtime.execution.plain_inputs import PlainInputs
from dsa_compile.runtime.execution.prompt_rows import PromptRows
from dsa_compile.runtime.execution.prompt_steps import LEAST_PROMPT_TOKENS, longest_prompt
from dsa_compile.runtime.execution.token_parts import PartShape, run_in_parts
from dsa_compile.runtime.pages.kinds import Caches, make_caches
from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.sampling.logprobs import token_logprobs
from dsa_compile.runtime.scheduling.stats import EAGER, StepKind

LOGITS = "logits"
Values = dict[str, Any]
_SCORED_ROWS = 64  # of a prompt at once: 33 MB of fp32 logits of the released vocabulary


class ModelSteps:
    """Steps of an artifact's model: from a batch to its logits, eager or as CUDA graphs.

    Owns the paged caches of every layer, ``[num_blocks, block_size, width]`` each under one block
    id: ``caches`` has them by key for each call that owns some, for those who move pages. What a
    page holds before a request writes its rows does not matter, NaN included.

    On a GPU, :meth:`forward` launches work and never waits for it. All calls must be made with the
    same current stream.

    Args:
        manifest: of the artifact.
        regions: its graphs by name.
        weights: for each call of a plan, by its name, the weights by key, on the target's device.
        num_blocks: blocks of each cache.
        max_num_seqs: rows of ``token_buffer``.
        deterministic: a decoding request's results must not depend on the others in its step: all
            decode steps run on the long graphs, in parts of the one form that
            :class:`~dsa_compile.runtime.execution.token_parts.PartShape` has for its device.
        caches: as :func:`make_caches` gives them, to use instead of own ones.
        debug_launches: wait for every op, so that one that fails on the GPU is named. Nothing is
            captured then, and everything runs on one stream.
        shipped_kernels: where the CUDA kernels of its steps come from, of those that are there.
        count_experts: count the tokens that every routed expert gets.

    Attributes:
        token_buffer: int64 ``[max_num_seqs]`` on the device, the last sampled token of each row of
            the scheduler. A batch's token of -1 is taken from there.
        expert_counts: of routed experts' tokens; None where nothing is counted.
        shipped_kernels: as given.
        least_prompt_tokens: of a step that runs a variant of prompts.
        longest_prompt: of a step that runs the long prompt variant.
        planned_bytes: of the GPU that loading planned to take; None where it planned nothing.

    Raises:
        ArtifactError: this machine is not the target.
        UserError: the caches do not fit into memory.
    """

    least_prompt_tokens = LEAST_PROMPT_TOKENS

    def __init__(
        self,
        manifest: Manifest,
        regions: Mapping[str, Region],
        weights: Mapping[str, Mapping[str, torch.Tensor]],
        num_blocks: int,
        max_num_seqs: int = 256,
        deterministic: bool = False,
        caches: Caches | None = None,
        debug_launches: bool = False,
        shipped_kernels: ShippedKernels = NO_KERNELS,
        count_experts: bool = False,
    ) -> None:
        spec = manifest.model.spec
        self.device = device_of(manifest.target)
        self.num_blocks = num_blocks
        self.block_size = manifest.block_size
        self.vocab_size = spec.vocab_size
        self.max_model_len = spec.max_position_embeddings
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = spec.eos_token_ids
        self.shipped_kernels = shipped_kernels
        self.planned_bytes: int | None = None
        heads = spec.num_attention_heads // manifest.compile.layout.tp
        self.longest_prompt = longest_prompt(spec, heads)
        self._topk = spec.index_topk
        self._deterministic = deterministic
        self._manifest = manifest
        self._weights = weights
        if caches is None:
            caches = make_caches(manifest, num_blocks, self.device)
        self.caches = caches
        # The CPU runs every op before the next without being asked to.
        self._wait: Callable[[], None] | None = None
        if debug_launches and self.device.type == "cuda":
            self._wait = partial(torch.cuda.synchronize, self.device)
        self.expert_counts = counts_of(manifest, regions, self.device) if count_experts else None
        self._regions, self._plan = regions, manifest.plans[MODEL]
        self._calls = self._bound(self._regions, self._plan)
        self.token_buffer = torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device)
        self._ring = StagingRing() if self.device.type == "cuda" else None
        self._graphs: dict[bool, CapturedSteps] = {}  # by whether they have prompt tokens
        self._eager_steps: Counter[StepKind] = Counter()

    def _bound(self, regions: Mapping[str, Region], plan: Plan) -> dict[str, list[BoundCall]]:
        given = (self._weights, self.caches, self._wait, self.expert_counts)
        return bound_calls(self._manifest, regions, plan, *given)

    def variation(
        self, *, plan: Plan | None = None, regions: Mapping[str, Region] | None = None
    ) -> Self:
        """A runner over the same weights and caches, without graphs of its own yet.

        Args:
            plan: run the calls of this plan instead of the model's.
            regions: run these instead of the artifact's; they take the same inputs.
        """
        other = copy(self)
        other._graphs = {}
        other._regions = regions or self._regions
        other._plan = plan or self._plan
        other._calls = other._bound(other._regions, other._plan)
        return other

    @property
    def short_context(self) -> int | None:
        """The longest context of a step on the short graphs; None if there are none."""
        return self._topk if SHORT in self._calls else None

    @property
    def variants(self) -> tuple[str, ...]:
        """The variants a step may run, ``long`` and perhaps others."""
        return tuple(self._calls)

    @torch.inference_mode()
    def capture(self, plan: GraphPlan, keys: Sequence[GraphKey] | None = None) -> None:
        """Capture steps as CUDA graphs, in place of those of another plan of their kind; before,
        every step runs without one.

        Args:
            plan: the graphs that there may be.
            keys: those to capture now, the largest first; None for all.
        """
        assert self._ring is not None, "CUDA graphs need a GPU"
        assert self._wait is None, "a captured step cannot be waited for op by op"
        mixed = bool(plan.mixed_tokens)
        if mixed not in self._graphs:
            self._graphs[mixed] = CapturedSteps(
                StepParts(
                    PlainInputs,
                    self._plain_step,
                    lambda key: self.vocab_size,
                    torch.float32,
                    self.device,
                    self._ring,
                )
            )
        with self.shipped_kernels.in_use():
            self._graphs[mixed].capture(plan, keys)

    def drop_graphs(self) -> None:
        """Give captured steps up; they run without graphs."""
        self._graphs = {}

    def _plain_step(self, tensors: dict[str, Tensor], variant: str) -> Tensor:
        ids, rows = tensors["input_ids"], tensors.pop("token_rows")
        tensors["input_ids"] = resolve_token_ids(ids, rows, self.token_buffer)
        return self._step(tensors, variant)

    @property
    def step_counts(self) -> Counter[StepKind]:
        """Steps so far by how they ran."""
        return sum((graphs.steps for graphs in self._graphs.values()), self._eager_steps)

    @torch.inference_mode()
    def values_of(self, batch: Batch) -> tuple[Tensor, Values]:
        """Launch one step without a graph; its logits as :meth:`forward` gives them, and all values
        of its calls by name."""
        variant = self.variant_of(batch)
        self._eager_steps[StepKind(EAGER, variant)] += 1
        with self.shipped_kernels.in_use():
            values: Values = self._to_device(batch)
            wanted = values["logit_rows"]
            run_calls(self._calls[variant][: len(self._plan.writing)], values)
            if len(batch.logit_rows):
                return self._head(values, variant, wanted), values
        return self._no_logits(), values

    def _no_logits(self) -> Tensor:
        return torch.empty((0, self.vocab_size), device=self.device)

    @torch.inference_mode()
    def score_prompt(self, values: Values, variant: str, prompt: PromptRows) -> list[TokenLogprobs]:
        """Log-probabilities of prompt tokens, an entry a row; waits for them.

        The head runs on no more rows at once than decode steps have, which is what memory was
        planned for.
        """
        entries: list[TokenLogprobs] = []
        most = min(self.max_num_seqs, _SCORED_ROWS)
        with self.shipped_kernels.in_use():
            for start in range(0, len(prompt.rows), most):
                part = slice(start, start + most)
                sent = self._upload({"rows": prompt.rows[part], "targets": prompt.targets[part]})
                logits = self._head(values, variant, sent["rows"])
                entries += token_logprobs(logits, sent["targets"], prompt.alternatives[part])
        return entries

    def _head(self, values: Values, variant: str, rows: Tensor) -> Tensor:
        """fp32 logits of some rows of a step."""
        values["logit_rows"] = rows
        run_calls(self._calls[variant][len(self._plan.writing) :], values)
        logits: Tensor = values[LOGITS]
        return logits.float()

    def execute(self, batch: Batch) -> torch.Tensor:
        """Run one step and wait for it; fp32 logits ``[N, V]`` on the CPU."""
        with torch.inference_mode():
            return self.forward(batch).float().cpu()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Launch one step.

        Returns:
            Logits ``[N, V]`` on the device, fp32 or in the model's dtype, to be used before the
            next call.
        """
        with self.shipped_kernels.in_use():
            return self._forward(batch)

    def _forward(self, batch: Batch) -> torch.Tensor:
        variant = self.variant_of(batch)
        for mixed, graphs in self._graphs.items():
            if (key := graphs.choose(batch, variant)) is not None:
                logits, _ = graphs.launch(key, batch)
                return logits[: len(batch.logit_rows)] if mixed else self._sampled(batch, logits)
        self._eager_steps[StepKind(EAGER, variant)] += 1
        tensors = self._to_device(batch)
        if self._is_alike(batch):
            return self._sampled(batch, self._run_alike(tensors, [LOGITS])[LOGITS])
        if len(batch.logit_rows):
            return self._step(tensors, variant)
        run_calls(self._calls[variant][: len(self._plan.writing)], tensors)
        return self._no_logits()

    def variant_of(self, batch: Batch) -> str:
        """The variant that a step runs: ``short`` where no context exceeds ``index_topk``, else
        ``long``; the one of prompts in place of each where every request begins in the step, tokens
        are not few and prompts not too long.

        A deterministic engine has no variants of prompts: a row has the same bits in whatever step.
        """
        if SHORT not in self._calls or self._is_alike(batch):
            return LONG
        variant = SHORT if batch.is_short(self._topk) else LONG
        many = batch.num_tokens >= self.least_prompt_tokens and not self._deterministic
        if many and batch.is_short(self.longest_prompt) and batch.is_prompts():
            made = for_prompts(variant)
            return made if made in self._calls else variant
        return variant

    def _is_alike(self, batch: Batch) -> bool:
        """Whether the step has to take the kernels of every other step of a token a request.

        The last token of a prompt counts too: with drafts it runs as a decoding request does.
        """
        return self._deterministic and batch.num_tokens == batch.num_requests

    def _step(self, tensors: dict[str, Tensor], variant: str) -> Tensor:
        run_calls(self._calls[variant], tensors)
        return tensors[LOGITS]

    def _run_alike(self, values: Mapping[str, Tensor], keys: Sequence[str]) -> dict[str, Tensor]:
        """Results of a step of a token a request, run in the form that all such steps have."""
        shape = PartShape.on(self.device, -(-self.max_model_len // self.block_size))
        return run_in_parts(partial(self._step, variant=LONG), values, keys, shape)

    def _sampled(self, batch: Batch, logits: Tensor) -> Tensor:
        """Select the logits that are wanted from those of every row of a decode step."""
        if len(batch.logit_rows) == batch.num_requests:
            return logits[: batch.num_requests]
        return logits.index_select(0, self._upload({"rows": batch.logit_rows})["rows"])

    def _to_device(self, batch: Batch) -> Values:
        """The batch's tensors by name, with the tokens that only the device knows."""
        arrays = batch.arrays()
        unknown = batch.num_tokens > 0 and int(batch.input_ids.min()) < 0
        if unknown:
            arrays["token_rows"] = batch.token_rows
        tensors = self._upload(arrays)
        if unknown:
            tensors["input_ids"] = resolve_token_ids(
                tensors["input_ids"], tensors.pop("token_rows"), self.token_buffer
            )
        if self._wait is not None:  # for the first op not to be blamed for what was before it
            self._wait()
        return tensors

    def _upload(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        if self._ring is None:
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        return self._ring.upload(arrays, self.device)


def resolve_token_ids(ids: Tensor, rows: Tensor, sampled: Tensor) -> Tensor:
    """Put sampled tokens where the host knew none.

    Args:
        ids: int64 ``[T]``, negative where the token is not known.
        rows: int32 ``[T]``, place of each token's request in ``sampled``.
        sampled: int64 ``[R]``, the last token of each request.

    Returns:
        int64 ``[T]``.
    """
    if ids.is_cuda:
        from dsa_compile.kernels.triton.token_ids import resolve_token_ids as kernel

        return kernel(ids, rows, sampled)
    return torch.where(ids < 0, sampled[rows.clamp(min=0)], ids)
