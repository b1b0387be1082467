"""Kernels that are made ready when a step wants them are counted."""

import threading

import pytest
import torch

from dsa_compile.kernels import pointwise
from dsa_compile.kernels.late_kernels import (
    kernel_made_ready,
    kernels_expected,
    late_kernels,
    watch_triton,
)
from dsa_compile.runtime import Engine
from tests.runtime.hash_runner import HashRunner


def test_an_engine_reports_those_since_it_was_made():
    kernel_made_ready()
    engine = Engine(HashRunner(num_blocks=8, block_size=4))
    assert engine.stats().late_kernels == 0
    kernel_made_ready()
    assert engine.stats().late_kernels == 1


def test_those_of_loading_are_not_late():
    before = late_kernels()
    with kernels_expected():
        kernel_made_ready()
        with kernels_expected():
            pass
        thread = threading.Thread(target=kernel_made_ready)
        thread.start()
        thread.join()
    assert late_kernels() == before
    kernel_made_ready()
    assert late_kernels() == before + 1


def test_inductor_s_are_counted(monkeypatch):
    before = late_kernels()
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lambda graph, inputs: graph)
    torch._dynamo.reset()
    double = torch.compile(lambda x: x + x, backend=pointwise._inductor, dynamic=True)
    assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))
    double(torch.ones(5))
    assert late_kernels() == before + 1
    double(torch.ones(1))
    assert late_kernels() == before + 2


def test_triton_s_are_counted_and_a_hook_that_is_set_is_kept(monkeypatch):
    knobs = pytest.importorskip("triton").knobs
    seen = []
    monkeypatch.setattr("dsa_compile.kernels.late_kernels._watching", False)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **given: seen.append(given))
    before = late_kernels()
    watch_triton()
    watch_triton()
    knobs.runtime.jit_post_compile_hook(key="a")
    assert (seen, late_kernels()) == ([{"key": "a"}], before + 1)
