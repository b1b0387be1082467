"""Requests that exercise the options of sampling, on logits made to tell right from wrong.

The logits of a request depend on the length of its prompt. A few tokens lead all others, each half
a unit behind the one before: all of them positive, all of them negative, or on both sides of zero,
as a penalty divides the one and multiplies the other; or they are equal, for ties.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.verify.inputs.prompt import random_tokens

TOKENS = 6
"""Tokens of a request at most."""

GREEDY = "greedy decoding"

SMALLEST = 64
"""Tokens of a vocabulary at least: the leaders and end tokens are different ones."""

_DRAWS = 48  # requests of an option, of several tokens each
_LEADERS = 8
_STEP = 0.5
_REPEATED = (0, 2, 3, 5)  # of the leaders, in prompts
_SEEDS = (0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), -1, -2, 12345)


class Logits(IntEnum):
    """Kind of a request's logits; the number chooses the length of its prompt."""

    MIXED = 0  # leaders on both sides of zero
    POSITIVE = 1
    NEGATIVE = 2
    TIED = 3  # leaders are equal in pairs
    FEW = 4  # leaders are all there is: the others are -inf
    FLAT = 5  # all tokens are equal
    STEEP = 6  # the first of the leaders is far ahead
    ENDING = 7  # the end tokens lead
    TURNING = 8  # another of the leaders is ahead at every position


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        option: name of what it exercises.
        logits: what its logits are like.
        params: its options.
        repeats: whether its prompt has some of the tokens that lead.
    """

    option: str
    logits: Logits
    params: SamplingParams
    repeats: bool = False

    @cached_property
    def unseeded(self) -> "Case":
        """Case without its seed, on which the definition of right tokens does not depend."""
        return replace(self, params=replace(self.params, seed=None))

    @property
    def penalised(self) -> bool:
        """Whether what may come next depends on the tokens before."""
        params = self.params
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


@dataclass(frozen=True)
class Script:
    """Logits by position, and the tokens that they are about.

    Attributes:
        logits: fp32 [P, V]; those behind the first ``n`` tokens are row ``n % P``.
        leaders: the tokens that lead, the likeliest first.
        ends: the end tokens.
    """

    logits: Tensor
    leaders: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, vocab_size: int) -> "Script":
        """Script for a vocabulary, whose first and last ids are among the leaders."""
        middle = random.Random(1).sample(range(2, vocab_size - 2), _LEADERS + 1)
        leaders = (middle[0], vocab_size - 1, middle[1], 0, *middle[2 : _LEADERS - 2])
        ends = (1, middle[-1], vocab_size - 2)
        # the others, far behind; in steps of 1/64, as all sums are exact then
        rest = torch.arange(vocab_size).mul(37).remainder(64).div(64).sub(40)
        kinds = []
        for kind in Logits:
            row = torch.full_like(rest, -torch.inf) if kind is Logits.FEW else rest.clone()
            best = {Logits.POSITIVE: 9.0, Logits.NEGATIVE: -2.0}.get(kind, 1.25)
            row[list(leaders)] = best - _STEP * torch.arange(len(leaders))
            if kind is Logits.TIED:
                row[list(leaders)] = best - _STEP * (torch.arange(len(leaders)) // 2)
            if kind is Logits.FLAT:
                row = torch.zeros_like(rest)
            if kind is Logits.STEEP:
                row[leaders[0]] += 300.0
            if kind is Logits.ENDING:
                row[list(ends)] = best + 3.0 - _STEP * torch.arange(len(ends))
            turns = range(TOKENS) if kind is Logits.TURNING else [0] * TOKENS
            for turn in turns:
                kinds.append(row.clone())
                kinds[-1][list(leaders)] = row[list(leaders)].roll(turn)
        return cls(torch.stack(kinds), leaders, ends)

    def prompt(self, case: Case) -> tuple[int, ...]:
        """The prompt of a case."""
        length = int(case.logits) * TOKENS or len(self.logits)
        vocabulary = self.logits.shape[1]
        taken = {*self.leaders, *self.ends}
        other = next(t for t in range(2, vocabulary) if t not in taken)
        made = random_tokens(length, vocabulary, seed=int(case.logits))
        made = tuple(other if token in taken else token for token in made)
        if not case.repeats:
            return made
        first = tuple(self.leaders[at] for at in _REPEATED)
        return (*first, *made[len(first) :])

    def cases(self) -> list[Case]:
        """Cases of all options, in the order in which options are searched for a fault."""
        return [*self._greedy(), *self._ends(), *self._drawn(), *self._seeds()]

    def _greedy(self) -> Iterator[Case]:
        """Options under which one token is left at every position."""
        plain = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        a, b, c, d, *_ = self.leaders
        ordinary = 7
        penalties: dict[str, tuple[float, ...]] = {
            "presence_penalty": (2.0, 0.75, -1.75),
            "frequency_penalty": (2.0, 0.25, -0.75),
            "repetition_penalty": (1.5, 3.0, 0.25),
        }
        for logits in Logits:
            yield Case(GREEDY, logits, plain)
            yield Case(GREEDY, logits, replace(plain, max_tokens=1 + logits % TOKENS))
            for bias in ({a: -100.0}, {b: 0.75, c: 1.5}, {ordinary: 60.0, a: 0.25}, {d: 2.0}):
                yield Case("logit_bias", logits, replace(plain, logit_bias=bias))
            yield Case("temperature", logits, replace(plain, temperature=1e-6, seed=1))
            all_of_them = self.logits.shape[1] + 1
            for count in (0, 1, 5, *([all_of_them] if logits in (Logits.FEW, Logits.TIED) else [])):
                params = replace(plain, logprobs=count, logit_bias={c: 1.25 * min(count, 5)})
                yield Case("logprobs", logits, params)
            for name, amounts in penalties.items():
                for amount in amounts:
                    for repeats in (False, True):
                        changed: dict[str, Any] = {name: amount}
                        params = replace(plain, **changed)
                        yield Case(name, logits, params, repeats)
            several = replace(
                plain, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5
            )
            for params in (several, replace(several, logit_bias={c: 2.0, b: -1.5}, logprobs=2)):
                yield Case("penalties together", logits, params, True)

    def _ends(self) -> Iterator[Case]:
        """Cases of the options that decide when a request ends."""
        plain = SamplingParams(max_tokens=TOKENS, temperature=0.0)
        a, b, *_ = self.leaders
        for logits in (Logits.ENDING, Logits.POSITIVE, Logits.NEGATIVE):
            for least in (0, 1, 2, TOKENS):
                yield Case("min_tokens", logits, replace(plain, min_tokens=least))
                stops = replace(plain, min_tokens=least, stop_token_ids=[a, b])
                yield Case("stop_token_ids", logits, stops)
                yield Case("stop_token_ids", logits, replace(stops, ignore_eos=True))
                pushed = replace(plain, min_tokens=least, logit_bias={self.ends[-1]: 90.0})
                yield Case("min_tokens", logits, pushed)
                yield Case("min_tokens", logits, replace(pushed, repetition_penalty=1.5), True)
            yield Case("ignore_eos", logits, replace(plain, ignore_eos=True))

    def _drawn(self) -> Iterator[Case]:
        """Options under which some tokens are left, each as likely as its definition says."""
        one = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        every = self.logits.shape[1]
        options: list[tuple[str, Logits, SamplingParams]] = [
            ("temperature", Logits.MIXED, one),
            ("temperature", Logits.NEGATIVE, replace(one, temperature=0.5)),
            ("temperature", Logits.POSITIVE, replace(one, temperature=2.0)),
            ("top_k", Logits.TIED, replace(one, top_k=3)),
            ("top_k", Logits.NEGATIVE, replace(one, top_k=2)),
            ("top_k", Logits.FLAT, replace(one, top_k=every // 3)),
            ("top_k", Logits.MIXED, replace(one, top_k=every - 1)),
            ("top_p", Logits.MIXED, replace(one, top_p=0.65)),
            ("top_p", Logits.TIED, replace(one, top_p=0.3)),
            ("top_p", Logits.FLAT, replace(one, top_p=0.4)),
            ("top_p", Logits.STEEP, replace(one, top_p=0.9)),
            ("min_p", Logits.NEGATIVE, replace(one, min_p=0.33)),
            ("min_p", Logits.TIED, replace(one, min_p=1.0)),
            ("filters together", Logits.POSITIVE, replace(one, top_k=4, top_p=0.8, min_p=0.1)),
            ("filters together", Logits.FEW, replace(one, top_k=6, top_p=0.9, temperature=1.5)),
            ("temperature", Logits.FEW, replace(one, logit_bias={self.leaders[1]: 1.0})),
            ("temperature", Logits.FLAT, replace(one, logit_bias={3: 8.0, every - 1: 7.0})),
        ]
        for name, logits, params in options:  # all filters rest on the first
            for seed in range(2 * _DRAWS if name == "temperature" else _DRAWS):
                yield Case(name, logits, replace(params, seed=seed))

    def _seeds(self) -> Iterator[Case]:
        """Seeds that differ in few bits, twice each, and none."""
        one = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        for seed in (*_SEEDS, *_SEEDS, None, None):
            yield Case("seed", Logits.FLAT, replace(one, seed=seed))
