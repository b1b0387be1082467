"""Sampling on the device: the kernel, emulated and on a GPU, against the sampler of the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings")

from dsa_compile.kernels.cuda.compiler import build
from dsa_compile.kernels.cuda.launch import CudaKernel
from dsa_compile.kernels.cuda.sample_tokens import MOST_TOKENS, OPTIONS, sample_tokens
from dsa_compile.runtime.execution.runner import StepInputs
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.sampling.device_sampler import DeviceSampler
from dsa_compile.runtime.sampling.draw_options import records_of
from dsa_compile.runtime.sampling.sampler import Sampler, SamplingState
from tests.kernels import emulator
from tests.kernels.compile_only import inspect
from tests.quick_cases import quick_first

on_gpu = pytest.mark.gpu
INFINITY, NAN = float("inf"), float("nan")

OPTION_SETS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 900, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.999999, "temperature": 5.0},
    {"top_k": 50, "top_p": 0.8},
    {"min_p": 0.05},
    {"min_p": 0.2, "top_k": 40, "top_p": 0.95, "temperature": 1.3},
    {"min_p": 1.0, "top_p": 0.5},
]


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    if not emulator.available():
        pytest.skip("needs g++")
    extra = Path(__file__).parent / "sample_emulator.h"
    header = tmp_path / "common.h"
    header.write_text(emulator.HEADER.read_text() + extra.read_text())
    monkeypatch.setattr(emulator, "HEADER", header)
    monkeypatch.setattr(CudaKernel, "__call__", emulator.launch)


def states_of(count, vocab, options=None):
    several = OPTION_SETS if options is None else [options]
    chosen = [several[i % len(several)] for i in range(count)]
    return [
        SamplingState(SamplingParams(seed=100 + i, **one), [1], (), vocab)
        for i, one in enumerate(chosen)
    ]


def options_of(states, steps):
    """As the device sampler lays them out, request i in row i."""
    records = records_of(range(len(states)), states, [steps] * len(states))
    return torch.from_numpy(records.view(np.uint8))


def kernel_tokens(logits, states, threads=64):
    for state in states:
        state.generated = 5
    last, out = torch.full((2, len(states)), -7)
    sample_tokens(logits, options_of(states, 5), last, out, threads=threads)
    assert torch.equal(last, out.clamp(min=0))
    return out.tolist()


def launch(sampler, logits, rows, states):
    """One token a request, each of which has five."""
    count = len(states)
    inputs = StepInputs(None, list(rows), states, [5] * count, [1] * count, ahead=True)
    return [tokens[0] for tokens in sampler.launch(logits, inputs).wait().results]


def host_tokens(logits, states):
    chosen = Sampler(logits.shape[1]).sample(logits.float(), states)
    return [choice.token_id for choice in chosen]


def check(logits, options=None):
    states = states_of(len(logits), logits.shape[1], options)
    assert kernel_tokens(logits, states) == host_tokens(logits, states)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick_first([torch.float32, torch.bfloat16]))
def test_draws_are_those_of_the_host(emulated, dtype):
    """Every option, on rows that are peaked, flat, and long-tailed."""
    generator = torch.Generator().manual_seed(0)
    for spread in (0.1, 1.0, 6.0):
        logits = torch.randn(len(OPTION_SETS), 700, generator=generator) * spread
        check(logits.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"top_k": 33}, {"top_p": 0.37}, {}, {"temperature": 0.0}])
def test_ties(emulated, options):
    """Equal logits rank by id, however many there are: more than are listed at once."""
    logits = torch.zeros(4, 3000)
    logits[1, 100:] = -1.0
    logits[2] = torch.arange(3000) % 3
    logits[3, ::2] = -0.0
    check(logits, options)


def test_the_likeliest_is_the_first_of_equals(emulated):
    logits = torch.zeros(2, 500)
    logits[0, [77, 300]] = 3.0
    logits[1] = -torch.arange(500.0)
    assert kernel_tokens(logits, states_of(2, 500, {"temperature": 0.0})) == [77, 0]


def test_rows_without_a_choice_fail_alone(emulated):
    logits = torch.zeros(6, 300)
    logits[0, 7] = NAN
    logits[1, 299] = INFINITY
    logits[2] = -INFINITY
    logits[3, :] = -INFINITY
    logits[3, 250] = -5.0
    logits[4, 0] = -NAN
    for options in ({"temperature": 0.0}, {}, {"top_p": 0.9}):
        tokens = kernel_tokens(logits, states_of(6, 300, options))
        assert tokens[:3] + tokens[4:5] == [-1] * 4
        assert tokens[3] == 250
        assert 0 <= tokens[5] < 300


def test_a_negative_row_leaves_the_last_tokens(emulated):
    logits = torch.randn(3, 90, generator=torch.Generator().manual_seed(1))
    options = options_of(states_of(3, 90), 5)
    options.numpy().view(OPTIONS)["row"] = [-1, 0, -1]
    last, out = torch.full((3,), -7), torch.full((3,), -7)
    sample_tokens(logits, options, last, out, threads=64)
    assert (out >= 0).all()
    assert last.tolist() == [out[1].item(), -7, -7]


@pytest.mark.slow
def test_a_row_of_another_width_apart(emulated):
    """Rows that are a view of wider ones, and a vocabulary below a block's threads."""
    wide = torch.randn(len(OPTION_SETS), 96, generator=torch.Generator().manual_seed(3))
    check(wide[:, :50])


# The first whose ids need 18 bits, GLM-5's, one between, and the most there can be.
@pytest.mark.slow
@pytest.mark.parametrize("vocab", [131_073, 154_880, 200_000, MOST_TOKENS])
def test_large_vocabularies(emulated, vocab):
    """Every option on a peaked row; ties of more tokens than 17 bits can tell apart."""
    logits = torch.randn(len(OPTION_SETS), vocab, generator=torch.Generator().manual_seed(4)) * 6
    logits[:, -1] = logits.amax(1) - 0.5
    check(logits)
    tied = torch.zeros(4, vocab)
    tied[1] = -(torch.arange(vocab) % 3)
    tied[2, : vocab - 9] = -INFINITY
    tied[3, :-1] = -20.0
    for options in ({"temperature": 0.0}, {}, {"top_k": vocab - 3}, {"top_p": 0.654321}):
        check(tied, options)


@pytest.mark.slow
def test_sums_of_the_largest_vocabulary_are_whole(emulated):
    """All tokens but one in one bin, with weights whose parts add up to nearly 32 bits."""
    distances = np.arange(12.4, 12.5, 1e-6, np.float32)
    units = (np.exp(-distances.astype(np.float64)) * 2.0**42).astype(np.int64)
    # A little below the largest part, for an exponential with other last bits.
    below = distances[(units & 0xFFFF) // 8 == 0xFFF8 // 8][0]
    logits = torch.full((24, MOST_TOKENS), -float(below))
    logits[:, MOST_TOKENS // 2] = 0.0
    for options in ({"top_p": 0.99999}, {"top_k": MOST_TOKENS - 1}):
        states = states_of(len(logits), MOST_TOKENS, options)
        got = np.array(kernel_tokens(logits, states))
        # A draw at the edge of two tokens may fall on the other one.
        assert abs(got - host_tokens(logits, states)).max() <= 1
        assert len(set(got)) > 8, "the tail is drawn from"


@pytest.mark.slow
@pytest.mark.parametrize("ulps", [0, -2, 2])
@pytest.mark.parametrize("step", quick_first([997, 1]))
def test_parts_of_weights_lose_nothing(emulated, step, ulps):
    """Over the distances of all tokens that weigh something, for any good exponential."""
    check_units(64, 1, step, ulps, "cpu")


@on_gpu
def test_parts_of_weights_lose_nothing_on_the_gpu():
    check_units(1024, 264, 1, 0, "cuda")


def check_units(threads, blocks, step, ulps, device):
    seen, wrong = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    source = str(Path(__file__).with_name("sample_units.cu"))
    kernel = CudaKernel(source, "sample_units", {"THREADS": threads, "ULPS": ulps})
    kernel((blocks, 1, 1), threads, step, seen, wrong)
    assert seen.item() == 2, "from the first distance to the last"
    assert wrong.item() == 0


def test_larger_vocabularies_are_refused():
    last, out = torch.full((2, 1), -7)
    logits = torch.zeros(1, MOST_TOKENS + 1)
    with pytest.raises(ValueError, match="sample_tokens takes at most 262144 tokens, not 262145"):
        sample_tokens(logits, options_of(states_of(1, MOST_TOKENS + 1), 5), last, out)
    assert (last.item(), out.item()) == (-7, -7)


@pytest.mark.parametrize("vocab", [MOST_TOKENS, MOST_TOKENS + 1])
def test_the_device_takes_what_the_kernel_takes(vocab):
    sampler = DeviceSampler(vocab, torch.zeros(1, dtype=torch.int64))
    assert sampler.takes(states_of(1, vocab)) == (vocab == MOST_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("logits", ["float", "__nv_bfloat16"])
def test_compiles_without_spills(arch, logits):
    binary = inspect(
        "sample_tokens",
        build("sample_tokens.cu", arch=arch, defines={"THREADS": 1024, "LOGITS": logits}),
    )
    assert binary.local_bytes == 0
    assert binary.registers <= 64
    assert "ATOMS.ADD" in binary.sass
    assert "ATOMS.CAS" not in binary.sass, "a 64-bit sum in shared memory is a loop"


def test_options_are_as_the_kernel_reads_them():
    assert OPTIONS.itemsize == 40
    assert [OPTIONS.fields[name][1] for name in OPTIONS.names] == [0, 4, 8, 12, 16, 24, 32]


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 13, 256])
@pytest.mark.parametrize("vocab", [129_280, 154_880, MOST_TOKENS])
def test_on_the_gpu(dtype, rows, vocab):
    """V3.2's, GLM-5's and the largest; a token differs only where a draw falls between two."""
    generator = torch.Generator().manual_seed(rows)
    logits = (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)
    states = states_of(rows, vocab)
    last = torch.full((rows,), -7, device="cuda")
    sampler = DeviceSampler(vocab, last)
    on_device = logits.cuda()
    got, again = (launch(sampler, on_device, range(rows), states) for _ in range(2))
    assert got == again == last.tolist()
    for state in states:
        state.generated = 5
    want = host_tokens(logits, states)
    assert sum(a != b for a, b in zip(got, want, strict=True)) <= rows // 100
    order = torch.randperm(rows, generator=generator)
    moved = launch(sampler, on_device[order.cuda()], order.tolist(), [states[i] for i in order])
    assert moved == [got[i] for i in order], "a row depends on those beside it"
