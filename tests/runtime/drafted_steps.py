"""Random decode steps with drafts, and the state that the step before one has left."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsa_compile.kernels.cuda.sample_tokens import OPTIONS
from dsa_compile.runtime import SamplingParams
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.draft_inputs import PaddedInputs, fits_padded
from dsa_compile.runtime.execution.draft_rows import RowState
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.sampling.sampler import SamplingState


@dataclass(frozen=True)
class Shape:
    """Sizes that steps have in common.

    Attributes:
        width: the most rows of a request.
        block_size: rows of a cache page.
        columns: pages of a request.
        rows: of the scheduler.
        vocab: tokens, few for drafts to be right.
    """

    width: int = 4
    block_size: int = 4
    columns: int = 9
    rows: int = 8
    vocab: int = 6


def step_of(generator: np.random.Generator, wanted: list[int], shape: Shape) -> StepInputs:
    """Requests with so many rows each, 0 for one that yields nothing; no two share a page."""
    counts = np.maximum(wanted, 1)
    requests, most = len(wanted), shape.columns * shape.block_size - shape.width
    starts = generator.integers(min(shape.width, most), most + 1, requests)
    rows = generator.permutation(shape.rows)[:requests]
    tables = generator.permutation(requests * shape.columns).astype(np.int32)
    tables = tables.reshape(requests, shape.columns)
    owners = np.repeat(np.arange(requests), counts)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    bounds = np.concatenate([[0], np.cumsum(counts)])
    ids = np.full(len(positions), -1)
    known = (generator.random(requests) < 0.5) | (np.array(wanted) == 0)
    ids[bounds[:-1][known]] = generator.integers(0, shape.vocab, known.sum())
    pages, offsets = np.divmod(positions, shape.block_size)
    batch = Batch(
        input_ids=ids,
        positions=positions,
        slot_mapping=tables[owners, pages].astype(np.int64) * shape.block_size + offsets,
        block_tables=tables,
        cu_seqlens=bounds.astype(np.int32),
        context_lens=(starts + counts).astype(np.int32),
        logit_rows=np.arange(len(positions)),
        request_rows=rows.astype(np.int32),
        tokens_each=int(counts[0]) if len(set(wanted)) == 1 else None,
    )
    yielding = [n for n, most in enumerate(wanted) if most]
    following = [-1 if most else int(generator.integers(0, shape.vocab)) for most in wanted]
    state = SamplingState(SamplingParams(), [1], (), shape.vocab)
    return StepInputs(
        batch,
        [int(rows[n]) for n in yielding],
        [state] * len(yielding),
        [9 + n for n in yielding],
        [wanted[n] for n in yielding],
        True,
        following,
    )


def state_of(generator: np.random.Generator, inputs: StepInputs, shape: Shape) -> RowState:
    """A state in which the step before has yielded fewer tokens than it might have."""
    state = RowState.empty(shape.rows, torch.device("cpu"))
    for tensor in (state.last, state.first):
        tensor[:] = torch.from_numpy(generator.integers(0, shape.vocab, shape.rows + 1))
    batch = inputs.batch
    state.ends[batch.request_rows] = torch.from_numpy(
        batch.positions[batch.cu_seqlens[:-1]]
        - generator.integers(0, shape.width, batch.num_requests)
    )
    return state


def options_of(generator: np.random.Generator, inputs: StepInputs, shape: Shape) -> np.ndarray:
    """Records of sampling options, greedy ones and others."""
    options = np.zeros(len(inputs.rows), OPTIONS)
    options["row"], options["top_k"] = inputs.rows, shape.vocab
    options["temperature"] = generator.choice([0.0, 1.0], len(inputs.rows))
    options["floor"], options["step"] = -np.inf, inputs.counts
    options["seed"] = generator.integers(0, 2**63, len(inputs.rows))
    return options


def padded_step(
    inputs: StepInputs, options: np.ndarray, shape: Shape, requests: int, columns: int
) -> tuple[dict[str, Tensor], Tensor]:
    """A step as it is sent for so many requests, and the places of those that yield among them."""
    assert fits_padded(inputs)
    sent = PaddedInputs(requests, shape.width, columns, shape.rows)
    memory = np.full(sent.layout.nbytes, 0x55, np.uint8)
    places = torch.tensor(sent.write(sent.in_numpy(memory), inputs, options), dtype=torch.int64)
    step = sent.layout.in_torch(torch.from_numpy(memory))
    return step | sent.constants(torch.device("cpu")), places


def copy_of(state: RowState, device: str = "cpu") -> RowState:
    """A state of its own."""
    return RowState(*(t.to(device, copy=True) for t in (state.last, state.ends, state.first)))
