"""Faults of the runtime, one at a time: the option that shows each is named."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dsa_compile.runtime import step_pipeline
from dsa_compile.runtime.execution import idle_rows, model_runner, model_steps, token_parts
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.pages.kinds import make_caches
from dsa_compile.runtime.pages.pages import Pages
from dsa_compile.runtime.pages.prefixes import PrefixIndex
from dsa_compile.runtime.pages.tiers import PrefixNode
from dsa_compile.runtime.sampling import draw_options, host_choice, sampler
from dsa_compile.runtime.scheduling.request import Request
from dsa_compile.runtime.scheduling.scheduler import Scheduler
from dsa_compile.verify.bisect.runtime_check import ANY, wrong_engine, wrong_option
from dsa_compile.verify.execution import exact_runner
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

Patch = pytest.MonkeyPatch


def change_batches(patch: Patch, change: Callable[[Batch], Batch]) -> None:
    right = step_pipeline.build_batch
    patch.setattr(step_pipeline, "build_batch", lambda step: change(right(step)))


def context_of_the_chunk(patch: Patch) -> None:
    """A later chunk attends to itself alone."""

    def change(batch: Batch) -> Batch:
        counts = np.diff(batch.cu_seqlens)
        own = np.where(counts > 1, counts, batch.context_lens)
        return replace(batch, context_lens=own.astype(np.int32))

    change_batches(patch, change)


def logits_of_the_next_request(patch: Patch) -> None:
    """From three requests on."""

    def change(batch: Batch) -> Batch:
        rows = batch.logit_rows
        return replace(batch, logit_rows=np.roll(rows, 1) if len(rows) > 2 else rows)

    change_batches(patch, change)


def tokens_ahead_of_another_row(patch: Patch) -> None:
    """A token that the host does not know is taken from the next row of the scheduler."""
    right = model_steps.resolve_token_ids
    patch.setattr(
        model_steps,
        "resolve_token_ids",
        lambda ids, rows, tokens: right(ids, rows, tokens.roll(1)),
    )


def padding_in_front(patch: Patch) -> None:
    """A padded step has its requests' pages one row down."""
    right = token_parts.parts_of

    def padded(*args: Any) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
        for part, count in right(*args):
            yield {**part, "block_tables": part["block_tables"].roll(1, 0)}, count

    patch.setattr(token_parts, "parts_of", padded)


def padding_of_graphs_that_writes(patch: Patch) -> None:
    """A padded row of a graph writes the first row of the first block."""
    patch.setitem(idle_rows.IDLE, "slot_mapping", 0)


def block_whatever_is_before_it(patch: Patch) -> None:
    """A block is found by its own tokens, under any prefix."""

    def match(self: PrefixIndex, ids: Any, salt: bytes | None = None) -> list[Any]:
        chain: list[Any] = []
        known = {node.key: node for node in self._at.values()}
        for start in range(0, len(ids) - self.block_size, self.block_size):
            node = known.get(ids[start : start + self.block_size].tobytes())
            if node is None:
                break
            chain.append(node)
        return chain

    patch.setattr(PrefixIndex, "match", match)


def last_token_reused(patch: Patch) -> None:
    """A prompt of whole blocks is found whole: no token is left to compute."""
    right = PrefixIndex.match
    patch.setattr(
        PrefixIndex, "match", lambda self, ids, salt=None: right(self, np.append(ids, 0), salt)
    )


def known_before_it_is_written(patch: Patch) -> None:
    """All blocks of a prompt are known once its first chunk is computed."""
    right = Pages.register_full_blocks

    def register(self: Pages, request: Any) -> None:
        computed, request.num_computed = request.num_computed, request.prompt_len
        right(self, request)
        request.num_computed = computed

    patch.setattr(Pages, "register_full_blocks", register)


def block_taken_from_a_running_request(patch: Patch) -> None:
    """Room is made by a block that its owner goes on using."""

    def make_room(self: Scheduler, request: Any) -> bool:
        victim = self._running[-1]
        if victim is request or victim.in_flight:
            return False
        block = victim.blocks[0]
        self.pages.blocks._references[block] = 0
        self.pages.blocks.num_owned -= 1
        self.pages.blocks._free.append(block)
        return True

    patch.setattr(Scheduler, "_make_room", make_room)


def prefix_held_behind_new_blocks(patch: Patch) -> None:
    """Blocks of the prefix that a request reuses may be evicted for the others that it needs."""
    right = Pages._take

    def take(self: Pages, request: Request) -> list[PrefixNode] | None:
        late: list[int] = []
        with patch.context() as inner:
            inner.setattr(self.blocks, "hold", late.append)
            taken = right(self, request)
        for block in late:
            self.blocks.hold(block)
        return taken

    patch.setattr(Pages, "_take", take)


def bias_of_the_row_before(patch: Patch) -> None:
    """A bias is added for the row before."""
    right = sampler.change_logits

    def change(logits: Any, bias: Any, *rest: Any) -> None:
        right(logits, ((bias[0] - 1).clamp(min=0), *bias[1:]), *rest)

    patch.setattr(sampler, "change_logits", change)


def options_of_the_request_before(patch: Patch) -> None:
    """A row of the scheduler keeps the options of its first request."""
    right = draw_options.records_of
    known: dict[int, Any] = {}

    def first(rows: Any, states: Any, counts: Any) -> Any:
        kept = [known.setdefault(row, state) for row, state in zip(rows, states, strict=True)]
        return right(rows, kept, counts)

    patch.setattr(model_runner, "records_of", first)


def shared_before_it_failed(patch: Patch) -> None:
    """Rows that a step which failed has written are shared as if they were other tokens' rows."""
    right = Scheduler.fail

    def fail(self: Scheduler, request: Request, reason: str) -> None:
        request.num_computed = request.prompt_len
        self.pages.register_full_blocks(request)
        right(self, request, reason)

    patch.setattr(Scheduler, "fail", fail)


def kept_behind_a_wrong_draft(patch: Patch) -> None:
    """Drafts that were looked up are kept where one is wrong, too."""

    def goes_on(chosen: list[Any], token: Any, state: Any, drafts: Any, length: Any) -> bool:
        chosen.append(token)
        return len(chosen) <= len(drafts)

    patch.setattr(host_choice, "_goes_on", goes_on)


FAULTS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    context_of_the_chunk: ("chunked prefill",),
    logits_of_the_next_request: ("batching",),
    tokens_ahead_of_another_row: ("overlap",),
    padding_in_front: ("deterministic",),
    padding_of_graphs_that_writes: ("CUDA graphs",),
    block_whatever_is_before_it: ("prefix reuse",),
    last_token_reused: ("prefix reuse",),
    known_before_it_is_written: ("prefix reuse",),
    block_taken_from_a_running_request: ("preemption",),
    prefix_held_behind_new_blocks: ("prefix reuse",),
    bias_of_the_row_before: ("batching",),
    options_of_the_request_before: ("overlap",),
    shared_before_it_failed: ("prefix reuse",),
    kept_behind_a_wrong_draft: ("drafting",),
}
SLOW = set(list(FAULTS)[5:])


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.slow if f in SLOW else ()) for f in FAULTS],
    ids=lambda fault: fault.__name__,
)
def test_the_option_is_named(
    recompiled: RecompiledArtifact, monkeypatch: Patch, fault: Callable[[Patch], None]
) -> None:
    fault(monkeypatch)
    found = wrong_option(recompiled)
    assert found is not None
    assert found[0] in FAULTS[fault], found


def read_as_other_tokens(patch: Patch) -> None:
    """Every request, alone or not."""
    change_batches(patch, lambda batch: replace(batch, input_ids=batch.input_ids ^ 1))


def layers_share_caches(patch: Patch) -> None:
    """All layers with caches alike have the same ones."""
    patch.setattr(exact_runner, "make_caches", partial(make_caches, shared=True))
    patch.setattr(model_steps, "make_caches", partial(make_caches, shared=True))


@pytest.mark.parametrize("fault", [read_as_other_tokens, layers_share_caches])
def test_what_no_option_hides(
    recompiled: RecompiledArtifact, monkeypatch: Patch, fault: Callable[[Patch], None]
) -> None:
    fault(monkeypatch)
    found = wrong_option(recompiled)
    assert found is not None
    assert found[0] == ANY
    assert "alone in a step" in found[1]


def test_the_engine_as_it_is_loaded(recompiled: RecompiledArtifact, monkeypatch: Patch) -> None:
    assert wrong_engine(recompiled) is None
    layers_share_caches(monkeypatch)
    found = wrong_engine(recompiled)
    assert found is not None
    assert found[0] == ANY
    assert "alone in a step" in found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "block_size"), [("fp32", 64), ("fp8", 16)])
def test_nothing_is_wrong_with_a_healthy_runtime(
    recipe: str, block_size: int, model_dir: Any, tmp_path: Any
) -> None:
    from dsa_compile.lowering.compile_model import compile_model

    path = tmp_path / "artifact"
    compile_model(model_dir, path, recipe=recipe, block_size=block_size, records=False)
    assert wrong_option(RecompiledArtifact.open(path)) is None
