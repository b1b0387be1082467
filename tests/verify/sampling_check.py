"""Sampling options: what requests draw beside one another, held to what each option means.

Logits are given, and no model runs: from them follows which tokens an option leaves, in what share
of many draws each must turn up, and when a request ends. A few requests on the model's own logits,
those of the finished graphs, show whether log-probabilities are of the right positions.
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from dsa_compile.runtime.requests.logprobs import TokenLogprobs
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.verify.bisect.runtime_answers import FLOOR, Answers
from dsa_compile.verify.bisect.runtime_scenes import Tokens
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.inputs.prompt import random_tokens
from tests.verify.sampling_cases import GREEDY, SMALLEST, TOKENS, Case, Script
from tests.verify.sampling_options import (
    allowed_tokens,
    end_tokens,
    is_greedy,
    probabilities,
)
from tests.verify.scripted_runner import ScriptedRunner

_DEVIATIONS = 5.0  # of a share of draws: once in two million sets of seeds, which are fixed
_ROWS = 64  # requests of a step
_MEASURED = (9, 6)  # tokens of the prompts whose log-probabilities are looked at


def wrong_sampling(answers: Answers) -> tuple[str, str] | None:
    """The first sampling option with which a request is answered wrongly, and how.

    Args:
        answers: of exact engines.
    """
    problem = _prompt_problem(answers)
    if problem:
        return "prompt_logprobs", problem
    vocab_size = answers.recompiled.exported.spec.vocab_size
    if vocab_size < SMALLEST:
        return None
    script = Script.of(vocab_size)
    check, ordered = _Check(answers, script), script.cases()
    cases = list(ordered)
    random.Random(0).shuffle(cases)
    half = [c for c in cases if c.params.seed is None or c.option == "seed" or c.params.seed % 2]
    # launched ahead, tokens are drawn by the same numbers: what is new is whose options are taken
    for overlap, some in ((False, cases), (True, half)):
        found = check.wrong(some, overlap)
        if found is None:
            continue
        case, problem = found
        plain = [c for c in cases if c.option == GREEDY]
        for option in dict.fromkeys(c.option for c in ordered):
            of_it = [c for c in cases if c.option == option]
            alone = check.wrong([*plain, *of_it, *plain], overlap)
            if alone is not None:
                return option, alone[1]
        return case.option, f"beside other requests: {problem}"
    return None


@dataclass
class _Check:
    """Requests with sampling options, run in one engine and judged one by one, then together."""

    answers: Answers
    script: Script
    _known: dict[tuple[Case, Tokens | int], set[int]] = field(default_factory=dict)

    def wrong(self, cases: Sequence[Case], overlap: bool) -> tuple[Case, str] | None:
        """The first case that is answered wrongly, and how."""
        options = {"max_num_seqs": _ROWS, "async_scheduling": overlap}
        longest = len(self.script.logits) + TOKENS
        script = partial(ScriptedRunner, logits=self.script.logits, ends=self.script.ends)
        engine = self.answers.load(options, longest, script)
        prompts = [list(self.script.prompt(case)) for case in cases]
        try:
            outputs = engine.generate(prompts, [case.params for case in cases])
        except Exception as error:  # whatever a fault of sampling leads to
            return cases[len(cases) // 2], f"does not run: {in_a_line(error)}"
        finally:
            engine.close()
        for case, output in zip(cases, outputs, strict=True):
            problem = self._problem(case, output)
            if problem:
                return case, problem
        drawn: dict[Case, list[tuple[int | None, Tokens]]] = defaultdict(list)
        for case, output in zip(cases, outputs, strict=True):
            if not is_greedy(case.params):
                drawn[case.unseeded].append((case.params.seed, tuple(output.token_ids)))
        for case, found in drawn.items():
            seeds = case.option == "seed"
            problem = _seeds_problem(found) if seeds else self._shares(case, found)
            if problem:
                return case, f"{problem}, {case.params}"
        return None

    def _problem(self, case: Case, output: RequestOutput) -> str:
        """Problem of an answer that cannot be right; empty if there is none."""
        params, made = case.params, tuple(output.token_ids)
        if not made:
            return f"no token with {params}"
        for place, token in enumerate(made):
            if token not in self._allowed(case, made[:place]):
                return f"token {place + 1} is {token}, which {params} rules out"
        if (output.logprobs is None) is not (params.logprobs is None):
            return f"log-probabilities are there or not against {params}"
        for place, stated in enumerate(output.logprobs or ()):
            if stated.token_id != made[place]:
                return f"log-probability of token {stated.token_id} for {made[place]}, {params}"
            problem = _logprob_problem(stated, self._row(case, place), params.logprobs or 0)
            if problem:
                return f"{problem}, {params}"
        return _end_problem(made, output.finish_reason, params, self.script.ends)

    def _row(self, case: Case, place: int) -> Tensor:
        length = len(self.script.prompt(case))
        return self.script.logits[(length + place) % len(self.script.logits)]

    def _allowed(self, case: Case, made: Tokens) -> set[int]:
        key = (case.unseeded, made if case.penalised else len(made))
        if key not in self._known:
            self._known[key] = allowed_tokens(
                self._row(case, len(made)), case.params, self.script.prompt(case), made,
                self.script.ends,
            )  # fmt: skip
        return self._known[key]

    def _shares(self, case: Case, found: Sequence[tuple[int | None, Tokens]]) -> str:
        """Problem of tokens drawn in wrong shares, alone or twice together; empty if there is none.

        Shares of tokens that are alike for neighbouring steps or seeds show random numbers that do
        not change with these.
        """
        right = probabilities(
            self._row(case, 0), case.params, self.script.prompt(case), (), self.script.ends
        )
        lines = [tokens for _, tokens in found]
        counts = Counter(itertools.chain(*lines))
        draws = counts.total()
        order = right.argsort(descending=True, stable=True)
        places = {token: place for place, token in enumerate(order.tolist())}
        up_to = right[order].cumsum(0)
        for most in (1 << n for n in range(len(right).bit_length())):
            count = sum(counts[token] for token in counts if places[token] < most)
            if _unlikely(count, draws, float(up_to[most - 1])):
                return f"the {most} likeliest tokens are drawn {count} of {draws} times"
        for token in order[:10].tolist():
            if _unlikely(counts[token], draws, float(right[token])):
                return f"token {token} is drawn {counts[token]} of {draws} times"
        same = float((right**2).sum())
        steps = [a == b for line in lines for a, b in itertools.pairwise(line)]
        seeds = [a == b for pair in itertools.pairwise(lines) for a, b in zip(*pair, strict=True)]
        for what, alike in (("step", steps), ("seed", seeds)):
            if _unlikely(sum(alike), len(alike), same):
                return f"{sum(alike)} of {len(alike)} tokens are those of the {what} before"
        return ""


def _unlikely(count: int, draws: int, share: float) -> bool:
    deviation = math.sqrt(draws * share * max(1 - share, 0.0))
    return abs(count - draws * share) > 1 + _DEVIATIONS * deviation


def _seeds_problem(found: Sequence[tuple[int | None, Tokens]]) -> str:
    """Equal seeds with other tokens, or other seeds with equal ones; all tokens are as likely."""
    of_seed: dict[int, Tokens] = {}
    seen: dict[Tokens, int | None] = {}
    for seed, tokens in found:
        if seed is not None and of_seed.setdefault(seed, tokens) != tokens:
            return f"seed {seed} draws other tokens the second time"
        if tokens in seen and (seed is None or seen[tokens] != seed):
            return f"seeds {seen[tokens]} and {seed} draw the same tokens"
        seen[tokens] = seed
    return ""


def _logprob_problem(stated: TokenLogprobs, raw: Tensor, alternatives: int) -> str:
    """Problem of one position's log-probabilities, held to its logits; empty if there is none."""
    right = raw.double().log_softmax(-1)
    value = float(right[stated.token_id])
    if not (stated.logprob == value or abs(stated.logprob - value) <= FLOOR):
        return f"log-probability {stated.logprob:.4f} for {value:.4f}"
    near = FLOOR if raw.dtype.itemsize > 4 else 0.0  # equal logits are not equal in fp32 then
    better, best = int((raw > raw[stated.token_id] + near).sum()), int((raw > -math.inf).sum())
    if not better < stated.rank <= 1 + int((raw > raw[stated.token_id] - near).sum()):
        return f"rank {stated.rank} of token {stated.token_id}"
    if len(stated.top) != min(alternatives, best):
        return f"{len(stated.top)} likeliest tokens for {min(alternatives, best)}"
    order = right.argsort(descending=True, stable=True)[: len(stated.top)]
    for (token, given), should in zip(stated.top, order.tolist(), strict=True):
        exchanged = near > 0 and abs(float(right[token] - right[should])) <= near
        if (token != should and not exchanged) or abs(given - float(right[token])) > FLOOR:
            return f"token {token} with {given:.4f} is listed for {should}"
    return ""


def _end_problem(
    made: Tokens, reason: str | None, params: SamplingParams, ends: Sequence[int]
) -> str:
    """Whether a request ended where it should not have, or went on."""
    stops = end_tokens(params, ends)
    first = next((n for n, t in enumerate(made, 1) if t in stops and n > params.min_tokens), 0)
    length = first or params.max_tokens
    if len(made) != length:
        return f"{len(made)} tokens for {length} with {params}"
    right = "stop" if first else "length"
    return "" if reason == right else f"ended by {reason!r}, not {right!r}, with {params}"


def _prompt_problem(answers: Answers) -> str:
    """Problem of prompts' log-probabilities, the only results for prompts; empty if none."""
    vocab_size = answers.recompiled.exported.spec.vocab_size
    prompts = [random_tokens(n, vocab_size, seed=70 + n) for n in _MEASURED]
    params = [
        SamplingParams(
            max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=n
        )
        for n in range(len(prompts))
    ]
    engine = answers.load({"max_num_batched_tokens": 8}, max(_MEASURED) + 2)
    try:
        outputs = engine.generate([list(prompt) for prompt in prompts], params)
    finally:
        engine.close()
    for prompt, asked, output in zip(prompts, params, outputs, strict=True):
        for problem in _prompt_problems(answers, prompt, asked, output):
            return f"{problem}, prompt of {len(prompt)} tokens"
    return ""


def _prompt_problems(
    answers: Answers, prompt: Tokens, params: SamplingParams, output: RequestOutput
) -> Iterator[str]:
    made = tuple(output.token_ids)
    rows = answers.logits(answers.steps([prompt], [made[:-1]]))
    of_prompt, of_made = output.prompt_logprobs or [], output.logprobs or []
    if len(of_prompt) != len(prompt) - 1:
        yield f"{len(of_prompt)} log-probabilities of the prompt"
        return
    counts = [params.prompt_logprobs or 0] * len(of_prompt) + [params.logprobs or 0] * len(of_made)
    follow = (*prompt[1:], *made)
    for row, stated, token, count in zip(rows, (*of_prompt, *of_made), follow, counts, strict=True):
        if stated.token_id != token:
            yield f"log-probability of token {stated.token_id} for {token}"
        problem = _logprob_problem(stated, row, count)
        if problem:
            yield problem
