"""Which kernel is bound, and what is said of the others."""

import pytest

from dsa_compile.errors import CompileError, UserError
from dsa_compile.kernels import registry
from dsa_compile.kernels.facts import size_in
from dsa_compile.kernels.implementation import Implementation
from dsa_compile.kernels.providers import PROVIDERS, Provider
from dsa_compile.lowering.binding import bind_kernels
from dsa_compile.lowering.compile_model import compile_model
from examples.small_models.models import save_hf, tiny_config, tiny_model

OP = "swiglu_packed"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_hf(tiny_model(tiny_config()), folder / "model")
    return compile_model(folder / "model", folder / "artifact", weights="none").program


@pytest.fixture
def bind(program, monkeypatch):
    """Bind the program for Hopper with these rows for :data:`OP`, and anything for other ops."""
    import dataclasses

    def run(*rows, kernels=()):
        known = {row.op for row in rows}
        ops = [n for n in registry._BY_NAME if n not in known]
        others = tuple(Implementation(op, "triton", "m:f") for op in ops)
        monkeypatch.setattr(registry, "KERNELS", (*rows, *others))
        config = dataclasses.replace(program.config, target="sm_90a", kernels=kernels)
        monkeypatch.setattr(program, "config", config)
        (binding,) = (b for b in bind_kernels(program) if b.op == f"dsa.{OP}.default")
        return binding

    return run


def row(provider, **rest):
    return Implementation(OP, provider, "m:f", **rest)


def test_the_first_that_takes_every_call(bind):
    refuses = row("cuda", conditions=(size_in("gate_up", 1, 7),))
    binding = bind(refuses, row("triton", note="fast"), row("torch"))
    assert [(c.implementation.provider, c.bound) for c in binding.candidates] == [
        ("cuda", False),
        ("triton", True),
        ("torch", False),
    ]
    assert "takes gate_up.shape[1] of 7, not" in binding.candidates[0].reason
    assert "dense" in binding.candidates[0].reason  # names a call
    assert binding.candidates[1].reason == "fast"
    assert [(r.provider, r.max_tokens) for r in binding.records()] == [("triton", None)]


def test_by_tokens(bind):
    binding = bind(row("cuda", max_tokens=64), row("torch", max_tokens=16), row("triton"))
    assert [(r.provider, r.max_tokens) for r in binding.records()] == [
        ("cuda", 64),
        ("triton", None),
    ]
    assert binding.candidates[1].reason == "cuda is preferred up to 64 tokens"


def test_no_implementation_beyond_some_tokens(bind):
    with pytest.raises(CompileError, match=f"{OP}: nothing implements it beyond 64 tokens"):
        bind(row("cuda", max_tokens=64))


def test_none_at_all_says_why_of_each(bind):
    with pytest.raises(CompileError, match=f"{OP}: nothing implements it for target sm_90a .cuda:"):
        bind(row("cuda", conditions=(size_in("gate_up", 1, 7),)))


def test_peers_are_bound_only_where_installed_or_asked_for(bind, monkeypatch):
    monkeypatch.setitem(PROVIDERS, "deep_gemm", Provider("deep_gemm", ("absent_pkg",), "x", True))
    binding = bind(row("deep_gemm"), row("triton"))
    assert binding.candidates[0].reason == "absent_pkg is not installed (x)"
    assert [r.provider for r in binding.records()] == ["triton"]
    binding = bind(row("deep_gemm"), row("triton"), kernels=(f"{OP}=deep_gemm",))
    assert [r.provider for r in binding.records()] == ["deep_gemm"]
    monkeypatch.setitem(PROVIDERS, "deep_gemm", Provider("deep_gemm", ("torch",), "x", True))
    assert [r.provider for r in bind(row("deep_gemm"), row("triton")).records()] == ["deep_gemm"]


def test_asked_for_takes_every_number_of_tokens(bind):
    binding = bind(row("cuda", max_tokens=64), row("triton"), kernels=(f"{OP}=cuda",))
    assert [(r.provider, r.max_tokens) for r in binding.records()] == [("cuda", None)]
    assert binding.candidates[1].reason == f"--kernel {OP}=cuda was given"


def test_asked_for_something_that_is_not_there(bind):
    with pytest.raises(UserError, match="has no op 'nonsense'; it has absorb_"):
        bind(row("triton"), kernels=("nonsense=triton",))
    with pytest.raises(CompileError, match=f"{OP}: nothing implements it"):
        bind(row("triton"), kernels=(f"{OP}=cuda",))
