"""The benchmark of sampling, on the CPU: fair draws pass its check, others do not."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from dsa_compile.kernels.cuda.sample_tokens import MOST_TOKENS, OPTIONS
from dsa_compile.measure.suites import sampling
from dsa_compile.runtime.sampling.draw_options import sample_on_host

each_draw = pytest.mark.parametrize("name", list(sampling.DRAWS))


def on_host(logits, options, last, tokens):
    sample_on_host(logits, options.numpy().view(OPTIONS), last, tokens)


@pytest.fixture
def made(monkeypatch):
    """A case, the kernel's candidate on the host."""
    monkeypatch.setattr(sampling, "sample_tokens", on_host)

    def make(name, rows=64, vocab=700):
        torch.manual_seed(0)
        logits = torch.randn(rows, vocab) * sampling.SPREAD
        return logits, sampling.case([logits], sampling.DRAWS[name])

    return make


@each_draw
@pytest.mark.parametrize("rows", [1, 64])
def test_candidates_are_right(made, name, rows):
    _, case = made(name, rows)
    assert {provider.partition("/")[0] for provider in case.candidates} == {"cuda", "torch"}
    for (call,) in case.candidates.values():
        assert case.check(call()) is None


@each_draw
def test_tokens_that_are_not_kept_are_told(made, name):
    logits, case = made(name)
    least = logits.argmin(1)
    told = {"greedy": "not the likeliest tokens", "temperature": "standard deviations"}
    assert told.get(name, "a token that is not kept") in case.check(least)
    assert case.check(least + 700) == "tokens outside the vocabulary"
    assert case.check(least * 0 - 1) == "tokens outside the vocabulary"


@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p"])
def test_draws_that_are_not_fair_are_told(made, name):
    """Always the likeliest token, and draws that are too cold."""
    logits, case = made(name, rows=256)
    assert "standard deviations" in case.check(logits.argmax(1))
    colder = replace(sampling.DRAWS[name], temperature=0.35)
    for (call,) in sampling.case([logits], colder).candidates.values():
        assert "standard deviations" in case.check(call())


def test_every_case_is_one_that_the_kernel_takes():
    plans = list(sampling.plans())
    assert len(plans) == len(sampling.DRAWS) * len(sampling.ROWS) * len(sampling.VOCABULARIES)
    assert max(sampling.VOCABULARIES) <= MOST_TOKENS
