"""Answers of engines over one artifact."""

import contextlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
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
from dsa_compile.verify.bisect.few_layers import first_of_each_kind, first_with_caches
from dsa_compile.verify.bisect.runtime_scenes import GREEDY, PLAIN, TOKENS, Round, Scene, Tokens
from dsa_compile.verify.checks.rewrite_run import in_a_line
from dsa_compile.verify.execution.exact import numbers
from dsa_compile.verify.execution.exact_runner import ExactRunner, FailingRunner, PaddedRunner
from dsa_compile.verify.execution.ranks import parts_of
from dsa_compile.verify.execution.stages import Stage, run_stage
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Prompt, random_tokens
from dsa_compile.verify.recompiled_artifact import RecompiledArtifact

MARGIN = 4.0
"""Largest difference between two runs over the largest error that the recipe's rounding makes."""

FLOOR = 2.0**-14
"""Difference of log-probabilities that fp32 explains by itself."""

_MOST_STEPS = 2000  # of a round
_SMALL_BLOCK = 16  # tokens
_LONGEST = 512  # tokens of a request among plain answers

_DRAWN = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=5, ignore_eos=True)
_AHEAD = replace(GREEDY, logprobs=None)  # tokens that may be chosen before the host knows them
_ROWS = 2  # requests of a lane at once


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
    _known: dict[tuple[Tokens, SamplingParams], Answer] = field(default_factory=dict)
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
        """An engine; where ``options`` say nothing of blocks, with room for all its requests.

        Args:
            options: of the engine, beyond :data:`PLAIN`.
            longest: tokens of a request at most.
            made: makes another runner in exact arithmetic, of the arguments of
                :class:`ExactRunner`.
        """
        manifest = self._manifest
        most = options.get("max_num_seqs", PLAIN["max_num_seqs"])
        blocks = options.get("num_gpu_blocks_override") or most * (
            -(-longest // manifest.block_size) + 2
        )
        chosen = EngineOptions(
            verify="header",
            skip_tokenizer_init=True,
            model_dir=None if manifest.weights.mode == "pack" else self.recompiled.model_dir,
            **(PLAIN | options | {"num_gpu_blocks_override": blocks}),
        )
        if not self.exact:
            return Engine.load(self.recompiled.artifact.path, chosen)
        of = (manifest, self._program, self._store, blocks, chosen.padded_rows,
              chosen.deterministic)  # fmt: skip
        count, drafts = chosen.num_speculative_tokens or 1, chosen.draft != "none"
        runner = (made or ExactRunner)(
            *of, num_drafts=count * drafts, planned=chosen.draft == "mtp"
        )
        return Engine(runner, chosen)

    def plain(
        self,
        prompts: Sequence[Tokens],
        params: Sequence[SamplingParams] = (GREEDY,),
        together: bool = True,
    ) -> list[Answer]:
        """Answers to prompts of an engine that reuses, cuts and pads nothing.

        Args:
            prompts: token ids of each.
            params: their sampling options, in turns.
            together: as many in a step as there are; else one after the other.
        """
        requests = list(zip(prompts, cycle(params), strict=False))
        wanted = [one for one in dict.fromkeys(requests) if one not in self._known]
        if self._engine is None:
            self._engine = self.load(self.options, _LONGEST)
        for batch in [wanted] if together else [[one] for one in wanted]:
            outputs = self._engine.generate([list(p) for p, _ in batch], [s for _, s in batch])
            self._known |= zip(batch, map(Answer.of, outputs), strict=True)
        return [self._known[one] for one in requests]

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
        answers = self.plain(prompts, together=together)
        steps = self.steps(prompts, [answer.tokens[:-1] for answer in answers])
        exact = self.logits(steps).log_softmax(-1)
        wanted = [steps.places[n][len(prompt) - 1 :] for n, prompt in enumerate(prompts)]
        self.limit = FLOOR
        if not self.exact:
            # of all rows: those wanted are few, and an engine may run them in another variant
            rounded = self.logits(steps, self.recompiled.store).log_softmax(-1)
            self.limit += MARGIN * float((rounded - exact).abs().max())
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

    def ahead_problem(self, lanes: int) -> str:
        """Problem of tokens that ranks choose for themselves in steps launched ahead, or nothing.

        A rank that chooses by the options of the request before on a row chooses another token than
        the first rank, and what they sum is wrong from the next step on.

        Args:
            lanes: of the layout.
        """
        assert self._engine is not None, "answers were measured before"
        count, vocab_size = lanes * _ROWS, self.recompiled.exported.spec.vocab_size
        prompts = [random_tokens(6 + n, vocab_size, seed=100 + n) for n in range(2 * count)]
        asked = [*[_DRAWN] * count, *[_AHEAD] * count]
        outputs = self._engine.generate([list(prompt) for prompt in prompts], asked)[count:]
        made, prompts = [tuple(output.token_ids) for output in outputs], prompts[count:]
        steps = self.steps(prompts, [tokens[:-1] for tokens in made])
        exact = self.logits(steps).log_softmax(-1)
        for number, (prompt, tokens) in enumerate(zip(prompts, made, strict=True)):
            rows = exact[steps.places[number][len(prompt) - 1 :]]
            behind = rows.amax(-1) - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            for place in (behind > 2 * self.limit).nonzero().flatten().tolist():
                return (
                    f"token {place + 1} is {tokens[place]}, which is not the finished graphs' "
                    f"likeliest, prompt of {len(prompt)} tokens"
                )
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
        longest = max(turn.longest for turn in scene.rounds)
        fails = any(turn.fails for turn in scene.rounds)
        runner = FailingRunner if fails else PaddedRunner if scene.padded else None
        try:
            engine = self.load(scene.options, longest, runner)
        except Exception as error:  # whatever a fault of loading raises
            return f"cannot be loaded: {in_a_line(error)}"
        try:
            for turn in scene.rounds:
                problem = self._round_problem(engine, turn, scene)
                if problem:
                    return problem
        except Exception as error:  # whatever a wrong block or batch leads to
            return f"does not run: {in_a_line(error)}"
        finally:
            with contextlib.suppress(Exception):  # blocks may be accounted for wrongly
                engine.close()
        return ""

    def _round_problem(self, engine: Engine, turn: Round, scene: Scene) -> str:
        together = scene.options != {} and turn.params == (GREEDY,)
        left_out = turn.aborted or int(turn.fails)
        wanted = self.plain(turn.prompts, turn.params, together)[left_out:]
        found = self._play(engine, turn, scene.ahead)[left_out:]
        prompts = turn.prompts[left_out:]
        for prompt, right, answer in zip(prompts, wanted, found, strict=True):
            problem = "fails" if answer is None else right.difference(answer, self.limit)
            if problem:
                return f"{problem}, prompt of {len(prompt)} tokens"
        return self._drafts_problem(engine, prompts, wanted)

    def _drafts_problem(
        self, engine: Engine, prompts: Sequence[Tokens], answers: Sequence[Answer]
    ) -> str:
        """Problem of exact drafts, held to the draft plans if these make them; else empty."""
        runner, reference = engine._runner, None
        if not isinstance(runner, ExactRunner) or not runner.num_drafts:
            return ""
        if runner.drafter is not None:
            reference = DraftReference(self._program, self._store, self._manifest.block_size)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids, chains = (*prompt, *answer.tokens), None
            if reference is not None:
                chains = reference.chains(ids, len(prompt), runner.num_drafts)
            problem = drafts_problem(ids, len(prompt), chains, runner.checked)
            if problem:
                return f"{problem}, prompt of {len(prompt)} tokens"
        return ""

    def _play(self, engine: Engine, turn: Round, ahead: bool) -> list[Answer | None]:
        """Answers to the requests of a round; None for those that were aborted or failed."""
        for number, (prompt, params) in enumerate(turn.requests):
            asked = replace(params, logprobs=None) if ahead else params
            engine.add_request(str(number), list(prompt), asked)
        if isinstance(engine._runner, FailingRunner):
            engine._runner.refused = len(turn.prompts[0]) if turn.fails else None
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
        finished = (done.get(str(number)) for number in range(len(turn.prompts)))
        return [None if o is None or o.error else Answer.of(o) for o in finished]
