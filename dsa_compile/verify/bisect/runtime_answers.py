"""Answers of engines over one artifact."""

import contextlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.plan import Plan
from dsa_compile.runtime.engine import Engine
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.requests.outputs import RequestOutput
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.verify.bisect.answer import Answer
from dsa_compile.verify.bisect.draft_check import drafts_problem
from dsa_compile.verify.bisect.draft_reference import DraftReference
from dsa_compile.verify.bisect.drawn_tokens import drawn_problem, drawn_requests
from dsa_compile.verify.bisect.few_layers import first_of_each_kind, first_with_caches
from dsa_compile.verify.bisect.runtime_scenes import PLAIN, TOKENS, Round, Scene, Tokens
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.execution.exact import numbers
from dsa_compile.verify.execution.exact_drafting_runner import ExactDraftingRunner
from dsa_compile.verify.execution.exact_runner import ExactRunner, PaddedRunner
from dsa_compile.verify.execution.ranks import parts_of
from dsa_compile.verify.execution.stages import Stage, run_stage
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

MARGIN = 4.0
"""Largest difference between two runs over the largest error that the recipe's rounding makes."""

FLOOR = 2.0**-14
"""Difference of log-probabilities that fp32 explains by itself."""

_MOST_STEPS = 2000  # of a round
_SMALL_BLOCK = 16  # tokens
_LONGEST = 512  # tokens of a request among plain answers

_GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=2, ignore_eos=True)
_SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
_AHEAD = replace(_GREEDY, logprobs=None)  # tokens that may be chosen before the host knows them


@dataclass(eq=False)
class Answers:
    """Engines over one artifact.

    Attributes:
        recompiled: the artifact.
        exact: run its finished program in exact arithmetic on the CPU, and not its kernels.
        options: of the engine of plain answers, beyond :data:`PLAIN`.
        limit: of the difference between two log-probabilities; :meth:`measure` finds it where
            engines round.
    """

    recompiled: RecompiledArtifact
    exact: bool
    options: dict[str, Any] = field(default_factory=dict)
    limit: float = FLOOR
    _known: dict[Tokens, Answer] = field(default_factory=dict)
    _engine: Engine | None = None

    def __post_init__(self) -> None:
        self._store = ExactWeightStore(self.recompiled.store.source)
        self._manifest = self.recompiled.artifact.manifest
        self._program = self.recompiled.replay.final

    def of_few_layers(self) -> "Answers":
        """Answers of a model with the first layer of each kind alone, where arithmetic is exact.

        All layers have the blocks and rows of a step in common, so that one of them shows which
        request's rows are taken, in a fraction of the time. Kernels run with all layers, as they
        are compiled.
        """
        return self._cut(first_of_each_kind) if self.exact else self

    def of_small_blocks(self) -> "Answers":
        """Answers of the first layers with small blocks, where arithmetic is exact.

        Blocks of any size are taken, kept and given back alike, and prompts that fill some small
        ones have a fraction of the tokens.
        """
        if not self.exact:
            return self
        made = copy(self)
        size = min(self.block_size, _SMALL_BLOCK)
        made._program = self.recompiled.finished(size)
        made._manifest = replace(self._manifest, block_size=size)
        return made._cut(partial(first_with_caches, program=made._program))

    def _cut(self, cut: Callable[[Plan], Plan]) -> "Answers":
        made = copy(self)
        plans = {name: cut(plan) for name, plan in self._program.plans.items()}
        made._program = replace(self._program, plans=plans)
        made._manifest = replace(self._manifest, plans=plans)
        made._known, made._engine = {}, None
        return made

    @property
    def block_size(self) -> int:
        """Tokens of a cache block."""
        return self._manifest.block_size

    def load(
        self, options: dict[str, Any], longest: int, made: Callable[..., Any] | None = None
    ) -> Engine:
        """An engine; where ``options`` have no ``num_blocks``, with room for all its requests.

        Args:
            options: of the engine, beyond :data:`PLAIN`.
            longest: tokens of a request at most.
            made: makes another runner in exact arithmetic, of the arguments of
                :class:`ExactRunner`, or with drafts those of :class:`ExactDraftingRunner`.
        """
        manifest = self._manifest
        most = options.get("max_running", PLAIN["max_running"])
        blocks = options.get("num_blocks") or most * (-(-longest // manifest.block_size) + 2)
        chosen = EngineOptions(
            verify="header",
            skip_tokenizer=True,
            model_dir=None if manifest.weights.mode == "pack" else self.recompiled.model_dir,
            **(PLAIN | options | {"num_blocks": blocks}),
        )
        if not self.exact:
            return Engine.from_artifact(self.recompiled.artifact.path, chosen)
        of = (manifest, self._program, self._store, blocks, chosen.padded_rows,
              chosen.deterministic)  # fmt: skip
        if chosen.draft == "none":
            plain: Callable[..., Any] = made or ExactRunner
            return Engine(plain(*of), chosen)
        count, planned = chosen.num_speculative_tokens or 1, chosen.draft == "mtp"
        drafting: Callable[..., Any] = made or ExactDraftingRunner
        return Engine(drafting(*of, num_drafts=count, planned=planned), chosen)

    def plain(self, prompts: Sequence[Tokens], together: bool = True) -> list[Answer]:
        """Answers to prompts of an engine that reuses, cuts and pads nothing.

        Args:
            prompts: token ids of each.
            together: as many in a step as there are; else one after the other.
        """
        wanted = [p for p in dict.fromkeys(prompts) if p not in self._known]
        if self._engine is None:
            self._engine = self.load(self.options, _LONGEST)
        for batch in [wanted] if together else [[p] for p in wanted]:
            outputs = self._engine.generate([list(p) for p in batch], _GREEDY)
            self._known |= zip(batch, map(Answer.of, outputs), strict=True)
        return [self._known[p] for p in prompts]

    def close(self) -> None:
        """Free the engine of plain answers."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def measure(self, prompts: Sequence[Tokens], together: bool = False) -> str:
        """Set the limit; why a plain answer to a prompt is wrong, or the empty text.

        The finished program is run without the runtime on the prompts and their plain answers: in
        exact arithmetic and, where engines round, as the recipe does, too.

        Args:
            prompts: token ids of each.
            together: serve them at once, so that every lane has one; else one after the other.
        """
        answers = self.plain(prompts, together)
        steps = self.steps(prompts, [answer.tokens[:-1] for answer in answers])
        exact = self.logits(steps).log_softmax(-1)
        wanted = [steps.places[n][len(prompt) - 1 :] for n, prompt in enumerate(prompts)]
        self.limit = FLOOR
        if not self.exact:
            rounded = self.logits(steps, self.recompiled.store).log_softmax(-1)
            self.limit += MARGIN * float((rounded - exact)[torch.cat(wanted)].abs().max())
        for prompt, answer, rows in zip(prompts, answers, wanted, strict=True):
            for place, (likely, row) in enumerate(zip(answer.logprobs, exact[rows], strict=True)):
                off = abs(likely.logprob - float(row[likely.token_id]))
                if not off <= self.limit:
                    how = "as one of several requests" if together else "alone in a step"
                    return (
                        f"{how}, log-probability of token {place + 1} is off by "
                        f"{off:.1e} from the finished graphs', limit {self.limit:.1e}, prompt of "
                        f"{len(prompt)} tokens"
                    )
        return ""

    def prompts_problem(self, prompts: Sequence[Tokens]) -> str:
        """Problem of the log-probabilities of prompts served at once, or the empty text."""
        assert self._engine is not None, "answers were measured before"
        outputs = self._engine.generate([list(prompt) for prompt in prompts], _SCORED)
        for prompt, output in zip(prompts, outputs, strict=True):
            steps = self.steps([prompt], [()])
            exact = self.logits(steps).log_softmax(-1)
            rounded = self.logits(steps, self.recompiled.store).log_softmax(-1)
            limit = FLOOR + MARGIN * float((rounded - exact).abs().max())
            found = [(entry.token_id, entry.logprob) for entry in output.prompt_logprobs or ()]
            if [token for token, _ in found] != [*prompt[1:]]:
                return f"log-probabilities of other tokens, prompt of {len(prompt)} tokens"
            for place, ((token, logprob), row) in enumerate(zip(found, exact, strict=False), 2):
                off = abs(logprob - float(row[token]))
                if not off <= limit:
                    return (
                        f"log-probability of the prompt's token {place} is off by {off:.1e} from "
                        f"the finished graphs', limit {limit:.1e}, prompt of {len(prompt)} tokens"
                    )
        return ""

    def draws_problem(self, lanes: int) -> str:
        """Problem of tokens that ranks draw for themselves, or the empty text.

        Args:
            lanes: of the layout.
        """
        assert self._engine is not None, "answers were measured before"
        prompts, asked = drawn_requests(lanes, self.recompiled.exported.spec.vocab_size)
        outputs = self._engine.generate([list(prompt) for prompt in prompts], asked)
        made = [tuple(output.token_ids) for output in outputs]
        steps = self.steps(prompts, [tokens[:-1] for tokens in made])
        exact = self.logits(steps).log_softmax(-1)
        off = (self.logits(steps, self.recompiled.store).log_softmax(-1) - exact).abs().amax(-1)
        for number, (prompt, tokens) in enumerate(zip(prompts, made, strict=True)):
            rows = steps.places[number][len(prompt) - 1 :]
            limit = FLOOR + MARGIN * float(off[rows].max())
            problem = drawn_problem(tokens, asked[number], exact[rows], limit)
            if problem:
                return f"{problem}, prompt of {len(prompt)} tokens"
        return ""

    def steps(self, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> Prompt:
        """Prompts and the tokens that follow each, in blocks of the artifact's size."""
        return Prompt.decoding(prompts, answers, self._manifest.block_size)

    def logits(self, steps: Prompt, store: WeightStore | None = None) -> Tensor:
        """Logits of the finished program without the runtime, fp64 ``[T, V]``; of the first lane.

        Args:
            steps: the requests.
            store: gives the weights for the recipe's rounding; None for exact arithmetic.
        """
        stage = Stage.of(self._program, store or self._store)
        return numbers(parts_of(run_stage(stage, steps).logits())[0]).double()

    def problem(self, scene: Scene) -> str:
        """The first request of a scene whose answer is not its plain one; empty if none is."""
        longest = max(len(prompt) for turn in scene.rounds for prompt in turn.prompts) + TOKENS
        try:
            engine = self.load(scene.options, longest, PaddedRunner if scene.padded else None)
        except Exception as error:  # whatever a fault of loading raises
            return f"cannot be loaded: {in_a_line(error)}"
        try:
            for turn in scene.rounds:
                wanted = self.plain(turn.prompts, scene.options != {})[turn.aborted :]
                prompts = turn.prompts[turn.aborted :]
                found = self._play(engine, turn, _AHEAD if scene.ahead else _GREEDY)
                for prompt, right, answer in zip(prompts, wanted, found, strict=True):
                    problem = right.difference(answer, self.limit)
                    if problem:
                        return f"{problem}, prompt of {len(prompt)} tokens"
                problem = self._drafts_problem(engine, prompts, wanted)
                if problem:
                    return problem
        except Exception as error:  # whatever a wrong block or batch leads to
            return f"does not run: {in_a_line(error)}"
        finally:
            self._close(engine)
        return ""

    def _close(self, engine: Engine) -> None:
        """Free an engine of a scene."""
        with contextlib.suppress(Exception):  # blocks may be accounted for wrongly
            engine.close()

    def _drafts_problem(
        self, engine: Engine, prompts: Sequence[Tokens], answers: Sequence[Answer]
    ) -> str:
        """Problem of an engine's drafts, held to the draft plans; empty if there is none."""
        runner = engine._runner
        if not isinstance(runner, ExactDraftingRunner) or runner.drafter is None:
            return ""
        reference = DraftReference(self._program, self._store, self._manifest.block_size)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = (*prompt, *answer.tokens)
            chains = reference.chains(ids, len(prompt), runner.num_drafts)
            problem = drafts_problem(ids, len(prompt), chains, runner.checked)
            if problem:
                return f"{problem}, prompt of {len(prompt)} tokens"
        return ""

    def _play(self, engine: Engine, turn: Round, params: SamplingParams) -> list[Answer]:
        """Answers to the requests of a round that are not aborted."""
        for number, prompt in enumerate(turn.prompts):
            engine.add_request(str(number), list(prompt), params)
        done: dict[str, RequestOutput] = {}
        steps = 0
        while engine.has_unfinished():
            if steps == turn.after:
                for number in range(turn.aborted):
                    engine.abort(str(number))
            steps += 1
            if steps > _MOST_STEPS:
                raise RuntimeError(f"unfinished after {_MOST_STEPS} steps")
            done |= {o.request_id: o for o in engine.step() if o.finish_reason is not None}
        return [Answer.of(done[str(n)]) for n in range(turn.aborted, len(turn.prompts))]
