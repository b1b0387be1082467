"""Steps with prompt tokens as CUDA graphs: a chunk of a prompt, alone or beside decoding requests.

There is a graph for each number of tokens and of requests that steps are padded to, of each
variant. Padding tokens lie behind those of the last request, where ``cu_seqlens`` ends: they belong
to nobody, write no cache row (slot -1), see no key and take no expert. Padded requests have no
token and an empty context. A step that would be padded to more than twice its tokens runs without a
graph.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsa_compile.ir.plan import LONG, SHORT, variants_taking
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.cuda_graphs import Step, captured_graph
from dsa_compile.runtime.execution.pinned_staging import Layout, StagingRing
from dsa_compile.runtime.failures.step_errors import while_doing
from dsa_compile.runtime.scheduling.stats import StepKind

# Requests of the smaller graphs; the larger ones have as many as a step may have.
FEW_REQUESTS = 64
# Longest context. Steps of longer ones take the GPU longer than the host.
LONGEST_CONTEXT = 16_384
_MOST_PADDING = 2  # a graph's tokens over a step's


@dataclass(frozen=True)
class MixedKey:
    """Key of the steps that a graph is captured for.

    Attributes:
        variant: of the regions, ``long`` or ``short``.
        tokens: of the step.
        rows: requests.
        columns: width of the block table.
    """

    variant: str
    tokens: int
    rows: int
    columns: int


@dataclass(frozen=True)
class MixedPlan:
    """Graphs of steps with prompt tokens that there may be.

    Args:
        tokens: ascending.
        rows: ascending.
        columns: width of the block table by variant.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    columns: Mapping[str, int]

    @classmethod
    def of(
        cls,
        tokens: Sequence[int],
        *,
        max_running: int,
        max_model_len: int,
        block_size: int,
        topk: int | None,
    ) -> "MixedPlan":
        """The graphs for an engine's limits.

        Args:
            tokens: of the steps.
            max_running: most requests of a step.
            max_model_len: longest context.
            block_size: rows of a cache page.
            topk: longest context of a short step, or None if there are no short regions.
        """
        contexts = {LONG: min(LONGEST_CONTEXT, max_model_len)}
        if topk is not None:
            contexts[SHORT] = min(topk, max_model_len)
        return cls(
            tuple(sorted(set(tokens))),
            tuple(sorted({min(FEW_REQUESTS, max_running), max_running})),
            {variant: -(-context // block_size) for variant, context in contexts.items()},
        )

    def graphs(self) -> Iterator[MixedKey]:
        """Graphs of the plan, the ones that need the most memory first."""
        for tokens in reversed(self.tokens):
            for rows in reversed(self.rows):
                for variant, columns in self.columns.items():
                    yield MixedKey(variant, tokens, rows, columns)

    def describe(self, block_size: int) -> str:
        """One line for those who start a server."""
        longest = max(self.columns.values()) * block_size
        return (
            f"{len(list(self.graphs()))} CUDA graphs of steps with prompts: tokens "
            f"{', '.join(map(str, self.tokens))}; contexts up to {longest:,}"
        )

    def choose(self, batch: Batch, variant: str) -> MixedKey | None:
        """The smallest graph for a step, or None if it must run without one.

        Args:
            batch: the step.
            variant: that takes its contexts; the long graphs take those of any.
        """
        wanted = max(batch.num_requests, len(batch.logit_rows))
        tokens = next((size for size in self.tokens if size >= batch.num_tokens), None)
        rows = next((size for size in self.rows if size >= wanted), None)
        if batch.tokens_each is not None or tokens is None or rows is None:
            return None
        if tokens > _MOST_PADDING * batch.num_tokens:
            return None
        width = batch.block_tables.shape[1]
        for name in variants_taking(variant):
            if self.columns.get(name, 0) >= width:
                return MixedKey(name, tokens, rows, self.columns[name])
        return None


def mixed_layout(key: MixedKey) -> Layout:
    """The inputs of a graph, all of which change from step to step."""
    tokens, rows = key.tokens, key.rows
    return Layout(
        {
            "input_ids": ((tokens,), np.int64),
            "positions": ((tokens,), np.int64),
            "slot_mapping": ((tokens,), np.int64),
            "token_rows": ((tokens,), np.int32),
            "logit_rows": ((rows,), np.int64),
            "cu_seqlens": ((rows + 1,), np.int32),
            "context_lens": ((rows,), np.int32),
            "block_tables": ((rows, key.columns), np.int32),
        }
    )


_PADDING = {
    "input_ids": 0,
    "positions": 0,
    "slot_mapping": -1,
    "token_rows": -1,
    "logit_rows": 0,
    "context_lens": 0,
    "block_tables": -1,
}


def write_mixed(batch: Batch | None, views: Mapping[str, NDArray[Any]]) -> None:
    """Fill a graph's inputs with a step and padding.

    Args:
        batch: at most as large as the views; None for padding only.
        views: of :func:`mixed_layout`.
    """
    arrays: dict[str, NDArray[Any]] = {}
    if batch is not None:
        rows = np.repeat(batch.request_rows, np.diff(batch.cu_seqlens))
        arrays = {**batch.arrays(), "token_rows": rows}
    for name, view in views.items():
        array = arrays.get(name, view[:0])
        count = len(array)
        # Requests beyond the step's own have no tokens: they begin where its tokens end.
        view[count:] = _PADDING.get(name, 0 if batch is None else batch.num_tokens)
        if array.ndim == 2:
            view[:count, array.shape[1] :] = _PADDING[name]
            view[:count, : array.shape[1]] = array
        else:
            view[:count] = array


def padded_mixed(batch: Batch, key: MixedKey) -> Batch:
    """A step with the padding of a graph; its first logits are those that the step wants."""
    layout = mixed_layout(key)
    views = layout.in_numpy(np.empty(layout.nbytes, np.uint8))
    write_mixed(batch, views)
    views.pop("token_rows")
    requests = np.full(key.rows, -1, np.int32)
    requests[: batch.num_requests] = batch.request_rows
    return Batch(**views, request_rows=requests, tokens_each=None)


class MixedGraphs:
    """Captured steps with prompt tokens.

    Args:
        plan: which.
        step: what is captured; it must neither synchronise nor read device memory on the host.
        resolve: input ids, request rows and the sampled tokens to the tokens of the step.
        token_buffer: int64, the last sampled token of each request row.
        vocab_size: width of the logits.
        ring: staging of inputs.
    """

    def __init__(
        self,
        plan: MixedPlan,
        step: Step,
        resolve: Callable[[Tensor, Tensor, Tensor], Tensor],
        token_buffer: Tensor,
        vocab_size: int,
        ring: StagingRing,
    ) -> None:
        self.plan = plan
        self._step, self._resolve, self._token_buffer = step, resolve, token_buffer
        self._ring = ring
        device = token_buffer.device
        largest = max(mixed_layout(key).nbytes for key in plan.graphs())
        self._inputs = torch.empty(largest, dtype=torch.uint8, device=device)
        # Graphs share one memory pool, so that each may overwrite what another leaves; the logits
        # are kept apart.
        self._logits = torch.empty((plan.rows[-1], vocab_size), dtype=torch.float32, device=device)
        self._captured: dict[MixedKey, torch.cuda.CUDAGraph] = {}
        self.replays: Counter[StepKind] = Counter()
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, keys: Sequence[MixedKey] | None = None) -> None:
        """Capture all graphs, or these ones.

        Each runs once before, on padding only: kernels are compiled and loaded then.

        Raises:
            StepError: an op failed, or the GPU did; names the op where one raised.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for key in keys or tuple(self.plan.graphs()):
                try:
                    self._upload(key, None)
                    self._run(key)
                    graph = captured_graph(partial(self._run, key), self._pool, stream)
                except Exception as error:
                    doing = f"a step of {key.tokens} tokens was captured"
                    raise while_doing(error, doing) from error
                self._captured[key] = graph
        torch.cuda.current_stream().wait_stream(stream)

    def forward(self, batch: Batch, variant: str) -> Tensor | None:
        """Launch a step; fp32 ``[N, V]`` logits, or None if there is no graph for it.

        The logits are overwritten by the next step.
        """
        key = self.plan.choose(batch, variant)
        graph = None if key is None else self._captured.get(key)
        if key is None or graph is None:
            return None
        self._upload(key, batch)
        graph.replay()
        self.replays[StepKind(f"{key.tokens} tokens", key.variant)] += 1
        return self._logits[: len(batch.logit_rows)]

    def _upload(self, key: MixedKey, batch: Batch | None) -> None:
        layout = mixed_layout(key)
        host = self._ring.take(layout.nbytes)
        write_mixed(batch, layout.in_numpy(host))
        self._ring.send(self._inputs[: layout.nbytes])

    def _run(self, key: MixedKey) -> None:
        tensors = mixed_layout(key).in_torch(self._inputs)
        rows = tensors.pop("token_rows")
        tensors["input_ids"] = self._resolve(tensors["input_ids"], rows, self._token_buffer)
        self._logits[: key.rows].copy_(self._step(tensors, key.variant))
