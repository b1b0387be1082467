"""Sampling options held to what each means; faults of them, one at a time, name the option."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsa_compile.runtime.execution import model_runner, model_steps
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.runtime.sampling import draw, draw_options, sampler, seen_tokens
from dsa_compile.verify.bisect.runtime_answers import Answers
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact
from tests.verify.sampling_check import wrong_sampling
from tests.verify.sampling_options import allowed_tokens

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def answers(recompiled: RecompiledArtifact) -> Answers:
    return Answers(recompiled, exact=True).of_few_layers()


def wrap(patch: Patch, module: Any, name: str, change: Callable[..., Any]) -> None:
    """``change`` is given the right function and its arguments."""
    right = getattr(module, name)
    patch.setattr(module, name, lambda *args: change(right, *args))


def repetition_divides(patch: Patch) -> None:
    """Negative logits, too, are divided."""

    def change(right: Any, logits: Any, bias: Any, masks: Any, seen: Any, amounts: Any) -> None:
        rows, tokens, _ = seen
        none = [entry[:0] for entry in seen]
        right(logits, bias, masks, none, amounts)
        values = logits[rows, tokens]
        logits[rows, tokens] = torch.where(values < 0, values / amounts[rows, 0] ** 2, values)
        right(logits, [entry[:0] for entry in bias], ((), ()), seen, amounts)

    wrap(patch, sampler, "change_logits", change)


def negative_penalties_are_none(patch: Patch) -> None:
    def change(right: Any, logits: Any, *given: Any) -> None:
        *others, amounts = given
        right(logits, *others, torch.cat([amounts[:, :1], amounts[:, 1:].clamp(min=0)], 1))

    wrap(patch, sampler, "change_logits", change)


def negative_bias_is_none(patch: Patch) -> None:
    def change(right: Any, logits: Any, bias: Any, *others: Any) -> None:
        rows, tokens, amounts = bias
        amounts = torch.where(amounts.isfinite(), amounts.clamp(min=0), amounts)
        right(logits, (rows, tokens, amounts), *others)

    wrap(patch, sampler, "change_logits", change)


def one_end_is_masked(patch: Patch) -> None:
    def change(right: Any, logits: Any, bias: Any, *others: Any) -> None:
        rows, _, amounts = bias
        masks = amounts.isneginf()
        later = masks & torch.tensor(
            [any(masks[:i] & (rows[:i] == row)) for i, row in enumerate(rows)], dtype=torch.bool
        )
        right(logits, [entry[~later] for entry in bias], *others)

    wrap(patch, sampler, "change_logits", change)


def stop_tokens_are_others(patch: Patch) -> None:
    patch.setattr(SamplingParams, "end_ids", lambda self, ends: frozenset(ends))


def frequency_counted_once(patch: Patch) -> None:
    """The frequency penalty of a token that came twice is that of one that came once."""
    right = seen_tokens.TokenCounts.append

    def append(self: seen_tokens.TokenCounts, token: int) -> None:
        right(self, token)
        self._counts[: self._size] = self._counts[: self._size].clip(max=1) * 0.5

    patch.setattr(seen_tokens.TokenCounts, "append", append)


def one_more_than_top_k(patch: Patch) -> None:
    """One token more than ``top_k`` is kept."""
    right = draw._draw_top_k
    patch.setattr(draw, "_draw_top_k", lambda scaled, top_k, *rest: right(scaled, top_k + 1, *rest))


def last_of_equals(patch: Patch) -> None:
    def argmax(right: Any, logits: torch.Tensor) -> Any:
        best, finite = right(logits.flip(1))
        return logits.shape[1] - 1 - best, finite

    for module in (sampler, draw):
        wrap(patch, module, "argmax", argmax)


def seeds_of_32_bits(patch: Patch) -> None:
    def uniforms(right: Any, seeds: Any, steps: Any) -> Any:
        return right(seeds & np.uint64(2**32 - 1), steps)

    wrap(patch, draw, "uniforms", uniforms)


def one_number_a_request(patch: Patch) -> None:
    wrap(patch, draw, "uniforms", lambda right, seeds, steps: right(seeds, steps * 0))


def at_most_64(patch: Patch) -> None:
    wrap(patch, draw, "_draw_top_k", lambda right, x, k, *rest: right(x, k.clamp(max=64), *rest))


def temperature_is_lower(patch: Patch) -> None:
    def drawn(right: Any, scaled: torch.Tensor, *rest: Any) -> Any:
        return right(scaled * 1.5, *rest)

    wrap(patch, draw, "draw", drawn)


def options_of_the_request_before(patch: Patch) -> None:
    """A row of the scheduler keeps the options of its first request."""
    right = draw_options.records_of
    known: dict[int, Any] = {}

    def first(rows: Any, states: Any, counts: Any) -> Any:
        kept = [known.setdefault(row, state) for row, state in zip(rows, states, strict=True)]
        return right(rows, kept, counts)

    patch.setattr(model_runner, "records_of", first)


def prompt_scored_one_off(patch: Patch) -> None:
    def scored(right: Any, logits: Any, tokens: torch.Tensor, counts: Any) -> Any:
        return right(logits.roll(1, 0), tokens, counts)

    wrap(patch, model_steps, "token_logprobs", scored)


FAULTS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    repetition_divides: ("repetition_penalty",),
    prompt_scored_one_off: ("prompt_logprobs",),
    negative_penalties_are_none: ("presence_penalty",),
    negative_bias_is_none: ("logit_bias",),
    one_end_is_masked: ("min_tokens",),
    stop_tokens_are_others: ("greedy decoding", "stop_token_ids"),
    last_of_equals: ("greedy decoding",),
    seeds_of_32_bits: ("seed",),
    one_number_a_request: ("temperature",),
    at_most_64: ("top_k",),
    temperature_is_lower: ("temperature",),
    options_of_the_request_before: ("temperature",),
    frequency_counted_once: ("frequency_penalty",),
    one_more_than_top_k: ("top_k", "seed"),
}
FAST = (repetition_divides, prompt_scored_one_off)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FAULTS],
    ids=lambda fault: fault.__name__,
)
def test_the_option_is_named(
    answers: Answers, monkeypatch: Patch, fault: Callable[[Patch], None]
) -> None:
    fault(monkeypatch)
    found = wrong_sampling(answers)
    assert found is not None
    assert found[0] in FAULTS[fault], found


@pytest.mark.slow
def test_nothing_is_wrong_with_healthy_sampling(answers: Answers) -> None:
    assert wrong_sampling(answers) is None


def test_the_meaning_of_sampling_options() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])

    def left(made: tuple[int, ...] = (), **options: Any) -> set[int]:
        params = SamplingParams(**({"temperature": 1.0} | options))
        return allowed_tokens(logits, params, (1,), made, (0,))

    assert left() == {0, 1, 2, 3}
    assert left(temperature=0.0) == {0}
    assert left(temperature=0.0, min_tokens=1) == {1}
    assert left(temperature=0.0, logit_bias={3: 5.0}) == {3}
    assert left((0,), temperature=0.0, presence_penalty=1.5) == {1}
    assert left((0, 0), temperature=0.0, frequency_penalty=0.6) == {1}
    assert left(temperature=0.0, repetition_penalty=0.25) == {1}  # the prompt's token
    assert left(top_k=2) == {0, 1}
    assert left(top_p=0.6) == {0}  # 0.64 of the mass
    assert left(top_p=0.7) == {0, 1}
    assert left(min_p=0.3) == {0, 1}
