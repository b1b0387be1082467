"""Faults of the runtime: batches, blocks, prefixes, sampling."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import Plant, Planting, given_to, result, wrap

TENSOR = "fp8-kv-tensor"
BATCH = "runtime.execution.batch."
CHANGE = "runtime.sampling.changed_rows.change_logits"
BLOCKS, PAGES = "runtime.pages.blocks.Blocks.", "runtime.pages.pages.Pages."
INDEX = "runtime.pages.prefixes.PrefixIndex."
CHUNKS, NO_PREFIX = "max_num_batched_tokens=2048", "enable_prefix_caching=False"


# Batches.
def laid_out(batch: Any, step: Any, positions: Any = None, first_page: bool = False) -> Any:
    """A batch with other positions, or with slots counted from its chunks' first page."""
    positions = batch.positions if positions is None else positions
    counts = np.diff(batch.cu_seqlens)
    owner = np.repeat(np.arange(len(counts)), counts)
    page, offset = np.divmod(positions, step.table.block_size)
    if first_page:
        page = page - page[batch.cu_seqlens[:-1]][owner] * (counts > 1)[owner]
    slots = batch.block_tables[owner, page].astype(np.int64) * step.table.block_size + offset
    return replace(batch, positions=positions, slot_mapping=slots)


def restarted(batch: Any, step: Any) -> Any:
    if batch.tokens_each == 1:
        return batch
    counts = np.diff(batch.cu_seqlens)
    return laid_out(batch, step, np.concatenate([np.arange(n) for n in counts]))


def first_logits(batch: Any, step: Any) -> Any:
    if max(entry[3] for entry in step.entries) > 1:
        return batch
    wanted = np.isin(batch.cu_seqlens[1:] - 1, batch.logit_rows)
    return replace(batch, logit_rows=batch.cu_seqlens[:-1][wanted].astype(np.int64))


def whole_contexts(batch: Any, step: Any) -> Any:
    known = [entry[0].num_tokens for entry in step.entries]
    contexts = np.maximum(batch.context_lens, known).astype(np.int32)
    columns = -(-int(contexts.max()) // step.table.block_size)
    tables = step.table.rows[batch.request_rows, :columns]
    return replace(batch, context_lens=contexts, block_tables=tables)


def pads_with_0(_: None, batch: Any, views: Any) -> None:
    for name, view in views.items() if batch is not None else ():
        np.maximum(view[len(getattr(batch, name)) :], 0, out=view[len(getattr(batch, name)) :])


def last_rows(whole: Any, run: Any, values: Any, keys: Any, shape: Any) -> Any:
    from dsa_compile.runtime.execution.token_parts import parts_of

    made: dict[str, list[Any]] = {key: [] for key in keys}
    for part, count in parts_of(values, shape):
        run(part)
        for key, parts in made.items():
            parts.append(part[key][-count:])
    return {key: torch.cat(parts) for key, parts in made.items()}


# Prefixes and blocks.
def found_by(ends: bool, root: bool) -> Plant:
    """Blocks are found by the first token alone, or all of them behind the root."""

    def match(whole: Any, index: Any, token_ids: Any, salt: bytes | None = None) -> Any:
        chain: list[Any] = []
        node, size = index.root, index.block_size
        for start in range(0, len(token_ids) - size, size):
            key = token_ids[start : start + size].tobytes()
            child = node.children.get(key)
            if ends:
                child = next((c for k, c in node.children.items() if k[:8] == key[:8]), None)
            if child is None:
                break
            chain.append(child)
            node = node if root else child
        return chain

    return wrap(INDEX + "match", match)


def stays_known(whole: Any, blocks: Any) -> int:
    tell, blocks._on_evict = blocks._on_evict, lambda block: None
    known = bytes(blocks._known)
    block: int = whole(blocks)
    blocks._on_evict, blocks._known[block] = tell, known[block]
    return block


def held_late(planting: Planting) -> None:
    """Blocks of a prefix are acquired once all others are allocated."""
    waiting: list[Any] = []
    admitting: list[Any] = []

    def take(whole: Any, pages: Any, request: Any) -> Any:
        admitting.append(request)
        found = whole(pages, request)
        admitting.pop()
        while waiting:
            pages.blocks.hold(waiting.pop(0))
        return found

    def hold(whole: Any, blocks: Any, block: int) -> None:
        if admitting:
            waiting.append(block)
        else:
            whole(blocks, block)

    planting.wrap(PAGES + "_take", take)
    planting.wrap(BLOCKS + "hold", hold)


def table_stays(whole: Any, pages: Any, request: Any) -> None:
    before = pages.table.rows[request.row].copy()
    whole(pages, request)
    pages.table.rows[request.row] = before


def one_column_late(whole: Any, pages: Any, request: Any, *given: Any) -> Any:
    row, held = pages.table.rows[request.row], len(request.blocks)
    before = row.copy()
    found = whole(pages, request, *given)
    new = request.blocks[held:]
    row[held:] = before[held:]
    row[held + 1 : held + 1 + len(new)] = new
    return found


# Sampling.
def first_options(whole: Any, logits: Any, records: Any) -> Any:
    drawn, moved = records["temperature"] > 0, records.copy()
    for name in ("top_k", "top_p", "floor", "seed", "step"):
        moved[name][drawn] = records[name][: drawn.sum()]
    return whole(logits, moved)


def reverse(name: str) -> Any:
    """A list of a new object is in reverse order."""
    return lambda _, made, *args, **kw: getattr(made, name).reverse()


def fault(id: str, about: str, plant: Plant, culprit: str = "", **given: Any) -> Fault:
    return Fault(id, about, plant, culprit, "runtime", **given)


FAULTS = (
    fault("short-if-any-is", "a step counts as short if one of its contexts is",
          wrap(BATCH + "Batch.is_short", lambda whole, batch, topk:
             (not batch.num_requests or int(batch.context_lens.min()) <= topk)), "batch",
          recipe=TENSOR),
    fault("short-at-one-more", "a context of index_topk + 1 tokens counts as short",
          wrap(BATCH + "Batch.is_short", lambda whole, batch, topk: whole(batch, topk + 1)),
          "batch"),
    fault("slots-of-the-first-page", "a chunk's slots count pages from its own start",
          result(BATCH + "build_batch", lambda batch, step: laid_out(batch, step, first_page=True)),
          "batch", recipe="fp8", hidden_by=CHUNKS, echo="tenstorrent/tt-metal#55630"),
    fault("positions-restart", "positions of a chunk count from the chunk's start",
          result(BATCH + "build_batch", restarted), "batch", hidden_by=CHUNKS,
          echo="mlx-node/mlx-node#33"),
    fault("logits-of-first-tokens", "a prompt's logits are taken of its first token",
          result(BATCH + "build_batch", first_logits), "batch", recipe="bf16"),
    fault("context-of-the-whole-prompt", "a chunk's context is as long as its request",
          result(BATCH + "build_batch", whole_contexts), "batch", recipe="fp8", hidden_by=CHUNKS),
    fault("padding-has-block-0", "padded rows write the first row of block 0",
          result("runtime.execution.idle_rows.write_padded", pads_with_0), "idle_rows",
          recipe=TENSOR, hidden_by="deterministic=False"),
    fault("logits-of-the-padding", "a padded part of a step gives the logits of its last rows",
          wrap("runtime.execution.token_parts.run_in_parts", last_rows), "token_parts",
          recipe="fp8", hidden_by="deterministic=False"),
    fault("layers-of-a-kind-share-caches", "all layers of a kind have the same caches",
          given_to("runtime.pages.kinds.make_caches", shared=True), "kinds"),
    fault("prefix-key-of-two-ends", "a block is found by its first token",
          found_by(ends=True, root=False), "prefixes", recipe="bf16", hidden_by=NO_PREFIX),
    fault("prefix-by-block-alone", "a block's tokens are found behind any prefix",
          found_by(ends=False, root=True), "prefixes", hidden_by=NO_PREFIX),
    fault("evicted-block-stays-known", "an evicted block stays in the tree",
          wrap(BLOCKS + "allocate", stays_known), "blocks", hidden_by=NO_PREFIX),
    fault("blocks-taken-before-the-prefix-is-held", "reused blocks may be evicted meanwhile",
          held_late, "pages", recipe=TENSOR, hidden_by=NO_PREFIX),
    fault("shared-block-not-in-the-table", "who shares a block goes on reading its own",
          wrap(PAGES + "register_full_blocks", table_stays), "pages", recipe="bf16",
          hidden_by=NO_PREFIX),
    fault("grown-block-one-column-late", "a new block goes a column too far into the table",
          wrap(PAGES + "grow", one_column_late), "pages", recipe="bf16"),
    fault("penalties-by-order", "penalties go to the first rows of a step",
          wrap(CHANGE, lambda whole, logits, bias, masks, seen, amounts: whole(logits, bias, masks,
             (seen[0].unique(return_inverse=True)[1], *seen[1:]), amounts)), "sampler",
          recipe="fp8", echo="vllm-project/vllm#5639"),
    fault("bias-on-the-first-row", "a bias goes to the first row",
          wrap(CHANGE, lambda whole, logits, bias, *given: whole(logits,
             (bias[0] - bias[0][:1], *bias[1:]), *given)), "changed_rows", recipe=TENSOR),
    fault("drawn-with-anothers-options", "rows are drawn with the options of the first requests",
          wrap("runtime.sampling.draw.choose", first_options), "draw", recipe="bf16",
          echo="vllm-project/vllm#5639"),
    fault("min-p-of-the-batch", "every row of a batch is cut at the largest min_p in it",
          given_to("runtime.sampling.draw.draw", min_p=lambda p: torch.full_like(p, p.max())),
          "draw"),
    fault("control-free-list-from-the-top", "free blocks are handed out from the other end",
          result(BLOCKS + "__init__", reverse("_free"))),
    fault("control-row-order", "rows of the block table are handed out from the other end",
          result(PAGES + "__init__", reverse("_free_rows")), recipe="fp8"),
)  # fmt: skip
