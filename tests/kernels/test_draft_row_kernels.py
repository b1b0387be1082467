"""Rows of padded steps with drafts: the kernels, emulated and on a GPU, against torch."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda import draft_rows as kernels
from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.device import rehearse
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.sample_tokens import OPTIONS
from dsa_compile.launches.rehearsed_steps import BoundGraphs, rehearse_steps
from dsa_compile.runtime.execution.draft_rows import DraftedRows, RowState, corrected_rows
from dsa_compile.runtime.execution.padded_rows import launched_rows, padded_rows
from tests.kernels import emulator
from tests.kernels.compile_only import inspect
from tests.many_cases import many
from tests.runtime.drafted_steps import (
    Shape,
    copy_of,
    options_of,
    padded_step,
    state_of,
    step_of,
)

MOST = 5


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, list[int], int, Shape, int | None]:
    """A seed, the rows that requests want, requests of nobody, a shape, and forced lengths."""
    width = draw(st.integers(1, MOST))
    wanted = draw(st.lists(st.integers(0, width), min_size=1, max_size=6).filter(any))
    block_size = draw(st.sampled_from([1, 4, 64]))
    columns = draw(st.integers(-(-2 * width // block_size), 2 * MOST + 3))
    shape = Shape(width, block_size, columns)
    forced = draw(st.none() | st.integers(1000, 5000))
    return draw(st.integers(0, 2**32 - 1)), wanted, draw(st.integers(0, 2)), shape, forced


@pytest.fixture
def emulated(monkeypatch):
    if not emulator.available():
        pytest.skip("needs g++")
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)
    monkeypatch.setattr(kernels, "_THREADS", 32)


def equal(ours, theirs, what):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    assert torch.equal(ours.cpu(), theirs), what


def tokens_of(generator, drafts, shape, vocab):
    """A token of every row: often the draft, sometimes none."""
    tokens = torch.from_numpy(generator.integers(0, vocab, shape))
    right = torch.from_numpy(generator.random(drafts.shape) < 0.5)
    tokens[:, :-1] = torch.where(right, drafts, tokens[:, :-1])
    return tokens.masked_fill(torch.from_numpy(generator.random(shape) < 0.1), -1)


def compare(made, other, states, shape, forced, generator):
    """Everything that a step asks of its rows, in the order in which it does.

    Args:
        made: its rows, by kernels.
        other: the same by torch.
        states: of both.
    """
    device, width = made.start.device, made.width
    ours, theirs = states
    for name in ("rows", "places", "grid", "following", "tables", "start", "last", "max_new"):
        equal(getattr(made, name), getattr(other, name), name)
    equal(made.options, other.options, "options")
    assert made.values.keys() == other.values.keys()
    for name, value in other.values.items():
        equal(made.values[name], value, name)
    equal(made.grid_options(), other.grid_options(), "options of the grid")

    drafts = other.with_drafts(torch.empty(len(other.rows), 0))[:0].view(0, len(other.rows))
    mine = drafts.to(device)
    if width > 1:
        drafts, mine = other.first_drafts(theirs), made.first_drafts(ours)
        equal(mine[0], drafts[0], "first drafts")
        drafts[1:] = torch.from_numpy(generator.integers(0, shape.vocab, drafts[1:].shape))
        mine[1:] = drafts[1:].to(device)
    for depth in range(2, width):
        (values, options), (wanted, records) = (
            rows.deeper(depth, shape.block_size) for rows in (made, other)
        )
        assert values.keys() == wanted.keys()
        for name, value in wanted.items():
            equal(values[name], value, (name, depth))
            assert values[name].data_ptr() % 16 == 0, "kernels are compiled for aligned pointers"
        equal(options, records, ("options", depth))
        assert mine[depth - 2].data_ptr() % 16 == 0
    equal(made.with_drafts(mine.T), other.with_drafts(drafts.T), "tokens")

    sampled = tokens_of(generator, drafts.T, tuple(other.places.shape), shape.vocab)
    settled = made.settle(ours, sampled.to(device), mine.T, forced)
    wanted = other.settle(theirs, sampled, drafts.T, forced)
    for name in ("outcome", "ends", "following", "options"):
        equal(getattr(settled, name), getattr(wanted, name), name)
    for name in ("last", "ends", "first"):
        equal(getattr(ours, name)[:-1], getattr(theirs, name)[:-1], name)


def check(seed, wanted, nobody, shape, forced, device="cpu"):
    generator = np.random.default_rng(seed)
    inputs = step_of(generator, wanted, shape)
    options, before = options_of(generator, inputs, shape), state_of(generator, inputs, shape)
    columns = shape.columns + seed % 3
    step, _ = padded_step(inputs, options, shape, len(wanted) + nobody, columns)
    ours, theirs = copy_of(before, device), copy_of(before)
    made = launched_rows({name: t.to(device) for name, t in step.items()}, ours, shape.block_size)
    other = corrected_rows(step, theirs, shape.block_size, flat=True)
    compare(made, other, (ours, theirs), shape, forced, generator)


@pytest.mark.slow
@settings(
    max_examples=many(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cases())
def test_kernels_do_what_torch_does(emulated, case):
    check(*case)


def test_a_record_keeps_its_top_k_beside_the_row():
    """The row that takes a token is half a word, the other half is another option."""
    options = torch.from_numpy(np.zeros(2, OPTIONS).view(np.int64).reshape(2, 5))
    assert OPTIONS.fields["row"][1] == 0
    assert OPTIONS.fields["top_k"][1] == 4
    assert OPTIONS.fields["step"][1] == 8 * 4
    assert options.shape[1] * 8 == OPTIONS.itemsize


@pytest.mark.parametrize("width", [1, 2, 4])
def test_nothing_is_read_from_the_device(width):
    """On tensors without memory, which nobody can read; every launch is one that loading makes."""
    shape = Shape(width)
    generator = np.random.default_rng(width)
    inputs = step_of(generator, [width, 1], shape)
    step, _ = padded_step(inputs, options_of(generator, inputs, shape), shape, 3, 9)
    step = {name: tensor.to("meta") for name, tensor in step.items()}
    state = RowState.empty(shape.rows, torch.device("meta"))
    with rehearse("sm_90a") as noted:
        rows = launched_rows(step, state, shape.block_size)
        drafts = torch.empty(3, width - 1, dtype=torch.int64, device="meta")
        assert rows.with_drafts(drafts).shape == (3 * width,)
        sampled = torch.empty(3, width, dtype=torch.int64, device="meta")
        assert rows.settle(state, sampled, drafts, None).outcome.shape == (3, 1 + width)
    graphs = BoundGraphs((), {}, "sm_90a", shape.vocab, drafts=True)
    assert noted.kernels.keys() <= rehearse_steps(graphs, (), lambda _: True).kernels.keys()


def test_elsewhere_torch_does_it():
    shape = Shape()
    generator = np.random.default_rng(0)
    inputs = step_of(generator, [4], shape)
    options, state = options_of(generator, inputs, shape), state_of(generator, inputs, shape)
    step, _ = padded_step(inputs, options, shape, 1, shape.columns)
    assert type(padded_rows(step, state, shape.block_size)) is DraftedRows


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_compiles_without_spills(arch):
    binary = inspect("draft_rows", build("draft_rows.cu", arch=arch, defines={"THREADS": 128}))
    assert binary.local_bytes == 0
    assert binary.registers <= 64


@pytest.mark.gpu
def test_on_the_gpu():
    for seed in range(many(60)):
        generator = np.random.default_rng(seed)
        width = int(generator.integers(1, MOST + 1))
        wanted = [width, *generator.integers(0, width + 1, generator.integers(0, 6)).tolist()]
        shape = Shape(width, int(generator.choice([1, 4, 64])), int(generator.integers(10, 40)))
        forced = None if seed % 2 else int(generator.integers(1000, 5000))
        check(seed, wanted, int(generator.integers(0, 3)), shape, forced, "cuda")
