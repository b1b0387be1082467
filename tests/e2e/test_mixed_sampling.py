"""Greedy requests beside some with every option, on a whole model, in steps that overlap."""

import pytest
import torch

from dsa_compile.runtime import Engine, Grammar, SamplingParams
from dsa_compile.runtime.requests.logprobs import TokenLogprobs

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
TARGETS = ["cpu", pytest.param("sm_90a", marks=pytest.mark.gpu(capability=(9, 0)))]
COUNT = 24


def greedy(**options) -> SamplingParams:
    return SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, **options)


SPECIAL = [
    greedy(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2),
    greedy(logit_bias={7: 3.0, 9: -4.0}, logprobs=5),
    SamplingParams(max_tokens=COUNT, min_tokens=12, temperature=0.0, logprobs=0),
    SamplingParams(
        max_tokens=COUNT,
        temperature=0.0,
        grammar=Grammar.json_schema(SCHEMA),
        logprobs=20,
        repetition_penalty=1.1,
    ),
]


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(3, 1500, (4 + 3 * n,), generator=generator).tolist() for n in range(count)
    ]


def load(path, **options) -> Engine:
    return Engine.load(path, num_gpu_blocks_override=200, max_num_seqs=16, **options)


def numbers(entries: list[TokenLogprobs] | None) -> list[float]:
    return [v for e in entries or [] for v in (e.logprob, *(value for _, value in e.top))]


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_tokens_are_those_of_steps_that_are_waited_for(trained, target, deterministic):
    """Deterministic steps are padded."""
    pytest.importorskip("xgrammar")
    asked, params = prompts(12), [greedy()] * 8 + SPECIAL
    path = trained(target, "fp32")
    ahead = load(path, overlap=True, deterministic=deterministic)
    waiting = load(path, overlap=False, deterministic=deterministic)
    with ahead, waiting:
        got, want = ahead.generate(asked, params), waiting.generate(asked, params)
        plain = ahead.generate(asked, greedy())
        assert ahead.stats().late_kernels == 0
    for a, b in zip(got, want, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert [(e.rank, [t for t, _ in e.top]) for e in a.logprobs or []] == [
            (e.rank, [t for t, _ in e.top]) for e in b.logprobs or []
        ]
        assert numbers(a.logprobs) == pytest.approx(numbers(b.logprobs), abs=1e-4)
    assert [o.token_ids for o in got[:8]] == [o.token_ids for o in plain[:8]]
    assert [o.token_ids for o in got[8:]] != [o.token_ids for o in plain[8:]]


@pytest.mark.gpu(capability=(9, 0))
def test_a_step_waits_for_its_event_alone(trained):
    """No copy back, no size that is read, no allocation that waits."""
    pytest.importorskip("xgrammar")
    with load(trained("sm_90a", "bf16")) as engine:
        for mode in ("default", "error"):  # once for what is allocated, and once watched
            for index, (prompt, one) in enumerate(zip(prompts(12), SPECIAL * 3, strict=True)):
                engine.add_request(f"r{index}", prompt, one)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                while engine.has_unfinished():
                    engine.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert engine.stats().late_kernels == 0
