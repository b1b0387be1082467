"""Drafting alone: which drafts are checked, how many are kept, and that tokens stay as they are.

Tokens follow from positions and tokens before, no model runs, and drafts are right and wrong in
every order: see :mod:`tests.verify.scripted_drafting_runner`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dsa_compile.ir.plan import DRAFT
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.verify.bisect.draft_check import drafts_problem
from dsa_compile.verify.bisect.runtime_answers import Answers
from dsa_compile.verify.bisect.runtime_scenes import Tokens
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.execution.exact_runner import ExactRunner
from dsa_compile.verify.inputs.prompt import random_tokens
from tests.verify.scripted_drafting_runner import (
    FollowingRunner,
    drafted_chain,
)

DRAFTING = "drafting"
"""The name of what is wrong."""

_TOKENS = 24  # of an answer
_APART = 48  # positions from prompt to prompt: those of a request's last tokens are its alone
_PROMPTS = 6
_DRAFTS = 3
_SMALLEST = 64  # tokens of a vocabulary

_GREEDY = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)


def wrong_drafting(answers: Answers) -> tuple[str, str] | None:
    """Problem of drafting: its name and the evidence, or None.

    Args:
        answers: of exact engines.
    """
    spec = answers.recompiled.exported.spec
    lengths = range(5, spec.max_position_embeddings - _APART, _APART)[:_PROMPTS]
    if spec.vocab_size < _SMALLEST or not lengths:
        return None
    prompts = [random_tokens(n, spec.vocab_size, seed=n) for n in lengths]
    params = [_params(number) for number in range(len(prompts))]
    plain = _answers(answers, {}, prompts, params)[0]
    for options, asked in _engines(answers, params):
        shown = ", ".join(f"{name}={value}" for name, value in options.items())
        try:
            made, runner = _answers(answers, options, prompts, asked)
        except Exception as error:  # whatever a wrong count of tokens leads to
            return DRAFTING, f"does not run: {in_a_line(error)}; {shown}"
        for prompt, right, found in zip(prompts, plain, made, strict=True):
            problem = _problem(prompt, right, found, runner)
            if problem:
                return DRAFTING, f"{problem}, prompt of {len(prompt)} tokens; {shown}"
    return None


def _params(number: int) -> SamplingParams:
    """Sampling options of request ``number``: every third draws, which must give the tokens that
    are drawn without drafts."""
    return replace(_GREEDY, temperature=1.0, seed=number) if number % 3 == 2 else _GREEDY


def _engines(
    answers: Answers, params: list[SamplingParams]
) -> Iterator[tuple[dict[str, Any], list[SamplingParams]]]:
    """Engine options, and the requests for them: described tokens are chosen by the host."""
    described = [replace(one, logprobs=1) for one in params]
    yield {"draft": "ngram", "num_speculative_tokens": _DRAFTS}, params
    if DRAFT in answers.recompiled.replay.final.plans:
        planned = {"draft": "mtp", "num_speculative_tokens": _DRAFTS}
        yield planned, described
        yield planned | {"async_scheduling": True}, params
        yield planned | {"deterministic": True}, params


def _answers(
    answers: Answers,
    options: dict[str, Any],
    prompts: list[Tokens],
    params: list[SamplingParams],
) -> tuple[list[Tokens], Any]:
    longest = max(map(len, prompts)) + _TOKENS
    engine = answers.load({"max_num_seqs": _PROMPTS, **options}, longest, FollowingRunner)
    used = engine._runner  # which a closed engine has no more
    try:
        outputs = engine.generate([list(prompt) for prompt in prompts], params)
    finally:
        engine.close()
    return [tuple(output.token_ids) for output in outputs], used


def _problem(prompt: Tokens, right: Tokens, found: Tokens, runner: ExactRunner) -> str:
    if found != right:
        place = next(
            (n for n, (a, b) in enumerate(zip(found, right, strict=False)) if a != b), len(right)
        )
        return f"with drafts token {place + 1} is another than without"
    ids, chains = (*prompt, *right), None
    if runner.drafter is not None:
        ends = range(len(prompt), len(ids))
        chains = {end: drafted_chain(ids[end], end, _DRAFTS) for end in ends}
    return drafts_problem(ids, len(prompt), chains, runner.checked)
