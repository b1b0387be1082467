"""Steps padded as CUDA graphs pad them, on the CPU: the same logits and cache rows."""

import numpy as np
import pytest
import torch

from dsa_compile.ir.plan import SHORT
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.plain_inputs import padded_batch
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.quick_cases import quick_first

from .conftest import CASES

BLOCKS = 64


def rows_of(runner):
    return [cache.clone() for layer in runner.caches.values() for cache in layer.values()]


def prefilled(c, lengths):
    """A runner with requests of these lengths, each in its own pages."""
    runner = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=BLOCKS))
    pages = BLOCKS // len(lengths)
    for row, prompt in enumerate(c.prompts(lengths)):
        runner.execute(step(runner, [prompt], [row * pages], [0], [row]))
    return runner, pages


def step(runner, tokens, first_pages, starts, rows):
    """One step of contiguous pages."""
    size = runner.block_size
    counts = np.array([len(t) for t in tokens])
    ends = np.array(starts) + counts
    width = -(-int(ends.max()) // size)
    table = np.array(first_pages)[:, None] + np.arange(width)
    table[np.arange(width) >= -(-ends // size)[:, None]] = -1
    positions = np.concatenate([np.arange(s, e) for s, e in zip(starts, ends, strict=True)])
    owner = np.repeat(np.arange(len(tokens)), counts)
    cu_seqlens = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return Batch(
        input_ids=np.concatenate(tokens),
        positions=positions,
        slot_mapping=table[owner, positions // size] * size + positions % size,
        block_tables=table.astype(np.int32),
        cu_seqlens=cu_seqlens,
        context_lens=ends.astype(np.int32),
        logit_rows=cu_seqlens[1:].astype(np.int64) - 1,
        request_rows=np.array(rows, np.int32),
        tokens_each=1 if (counts == 1).all() else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", quick_first(CASES))
@pytest.mark.parametrize("above", [False, True])
def test_padded_rows_change_nothing(case, name, above):
    """Below index_topk and above it; other pages, block 0 too, hold NaN."""
    c = case(name)
    lengths = [3, c.topk - 2, 4 * c.topk + 1 if above else 5]
    results = []
    for rows in (3, 8):
        runner, pages = prefilled(c, lengths)
        used = [row * pages + page for row in range(3) for page in range(pages)]
        for layer in runner.caches.values():
            for cache in layer.values():
                free = torch.ones(BLOCKS, dtype=torch.bool)
                free[used] = False
                cache[free] = torch.nan
        batch = step(runner, [[9], [11], [13]], [r * pages for r in range(3)], lengths, [0, 1, 2])
        width = -(-runner.max_model_len // runner.block_size)
        logits = runner.execute(batch if rows == 3 else padded_batch(batch, rows, width))[:3]
        results.append((logits, rows_of(runner)))
    (plain, plain_rows), (padded, padded_rows) = results
    torch.testing.assert_close(padded, plain, rtol=0, atol=1e-5)
    for a, b in zip(plain_rows, padded_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("above", [False, True])
def test_padding_behind_a_prompt_changes_nothing(case, name, above):
    """Decoding requests and a chunk of a prompt in one step, as they are captured together."""
    c = case(name)
    lengths = [3, 2 * c.topk if above else 5, 7]
    (chunk,) = c.prompts([c.topk + 9 if above else 6], seed=3)
    results = []
    for tokens in (None, len(chunk) + 11):
        runner, pages = prefilled(c, lengths)
        used = [row * pages + page for row in range(3) for page in range(pages)]
        for layer in runner.caches.values():
            for cache in layer.values():
                free = torch.ones(BLOCKS, dtype=torch.bool)
                free[used] = False
                cache[free] = torch.nan
        first_pages = [r * pages for r in range(3)]
        batch = step(runner, [[9], [11], chunk], first_pages, lengths, [0, 1, 2])
        if tokens is not None:
            width = -(-runner.max_model_len // runner.block_size)
            batch = padded_batch(batch, 8, width, tokens)
        assert (runner.variant_of(batch) == SHORT) == (not above)
        results.append((runner.execute(batch)[:3], rows_of(runner)))
    (plain, plain_rows), (padded, padded_rows) = results
    torch.testing.assert_close(padded, plain, rtol=0, atol=1e-5)
    for a, b in zip(plain_rows, padded_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5, equal_nan=True)


def test_a_token_that_only_the_device_knows(case):
    c = case("grouped-4-layers")
    results = []
    for known in (True, False):
        runner, pages = prefilled(c, [5, 40])
        runner.token_buffer[torch.tensor([7, 2])] = torch.tensor([9, 11])
        batch = step(
            runner,
            [[9] if known else [-1], [4, 5, 6, 11 if known else -1]],
            [0, pages],
            [5, 40],
            [7, 2],
        )
        results.append(runner.execute(batch))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", CASES)
def test_short_and_long_are_equivalent(case, name):
    """Requests below, at and above the threshold, and a batch that crosses it on the way.

    The short graphs sum over keys in another order, so rows behind the first layer's may differ in
    the last bits.
    """
    c = case(name)
    lengths = [1, c.topk // 2, c.topk - 3]
    results = []
    for split in (True, False):
        runner = load_runner(c.artifact, EngineOptions(num_gpu_blocks_override=BLOCKS))
        if not split:
            del runner._calls[SHORT]
        engine = Engine(runner)
        params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        outs = []
        for prompts in (c.prompts(lengths), c.prompts([c.topk, c.topk + 1])):
            outs += [out.token_ids for out in engine.generate(prompts, params)]
        results.append((outs, runner.caches))
    (short, short_caches), (long, long_caches) = results
    assert short == long
    pairs = zip(short_caches.values(), long_caches.values(), strict=True)
    for layer, (a, b) in enumerate(pairs):
        for key in a:
            if layer == 0:
                assert torch.equal(a[key], b[key]), key
            torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-4)


def test_deterministic_decode_steps_are_alike(case, monkeypatch):
    """Alone or beside others of any length: the same shapes, the long graphs, the same bits."""
    c = case("grouped-4-layers")
    lengths = [3, 40, c.topk, 90]
    seen, alone = set(), []
    for rows in ([0], [1], [2], [3], [0, 1, 2, 3], [3, 1]):
        runner, pages = prefilled(c, lengths)
        runner._deterministic = True
        run = runner._step

        def note(tensors, variant, run=run):
            seen.add((*(tuple(t.shape) for t in tensors.values()), variant))
            return run(tensors, variant)

        monkeypatch.setattr(runner, "_step", note)
        tokens = [[20 + row] for row in rows]
        batch = step(runner, tokens, [r * pages for r in rows], [lengths[r] for r in rows], rows)
        logits = runner.execute(batch)
        assert len(logits) == len(rows)
        if len(rows) == 1:
            alone.append(logits[0])
        for row, found in zip(rows, logits, strict=True):
            assert torch.equal(found, alone[row])
    assert len(seen) == 1
    assert next(iter(seen))[-1] == "long"


def test_random_weights_need_no_checkpoint(case, tmp_path):
    c = case("grouped-4-layers")
    compile_model(c.model_dir, tmp_path / "a", weights="none", block_size=16)
    runner = load_runner(
        tmp_path / "a", EngineOptions(num_gpu_blocks_override=BLOCKS, load_format="dummy")
    )
    logits = runner.execute(step(runner, [[5, 6, 7]], [0], [0], [0]))
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_a_limit_on_the_length_leaves_room_for_many(case):
    """The default number of blocks on the CPU goes by the model, not by one request."""
    c = case("grouped-4-layers")
    limited, free = (
        load_runner(c.artifact, EngineOptions(max_model_len=limit)) for limit in (32, None)
    )
    assert limited.num_blocks == free.num_blocks > 32
