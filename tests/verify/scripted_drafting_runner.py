"""Runners whose next token depends on position and token alone, for what drafting makes of drafts.

No model runs. Where a draft is wrong the token behind it is another, so that what is kept too far
shows; and drafts are right often and wrong often, in every order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsa_compile.ir.execution import BoundCall
from dsa_compile.ir.plan import DRAFT, Plan
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.drafter import Values
from dsa_compile.runtime.execution.model_steps import LOGITS
from dsa_compile.verify.execution.exact_runner import ExactRunner

_TOKENS, _FIRST = 11, 5  # that turn up: few, so that look-ups find what was there before
_WINDOW = 16  # positions: one token in three is followed by another in every second of these
_AHEAD = 3.0  # of the other tokens that may be drawn


def followers(positions: Tensor, tokens: Tensor) -> Tensor:
    """The likeliest token behind each token at its position."""
    turned = (positions // _WINDOW % 2) * (tokens % 3 == 0)
    return (tokens * 31 + 7 + 17 * turned) % _TOKENS + _FIRST


def drafted(positions: Tensor, tokens: Tensor) -> Tensor:
    """Drafts behind tokens: :func:`followers`, and in two places of five the token beside."""
    wrong = (positions * 7 + tokens * 13) % 5 < 2
    return followers(positions, tokens) + wrong.long()


def drafted_chain(token: int, position: int, depth: int) -> tuple[int, ...]:
    """Drafts behind a token at a position, each behind the one before."""
    made: list[int] = []
    for ahead in range(depth):
        found = drafted(torch.tensor([position + ahead]), torch.tensor([token]))
        made.append(token := int(found))
    return tuple(made)


class FollowingRunner(ExactRunner):
    """Runner with drafts or without; a draft made of another position's state is wrong.

    States are positions: a state comes from the position before, or from the first draft's where
    all deeper ones take it.
    """

    _depth = 1  # of the drafts that are made

    def forward(self, batch: Batch) -> Tensor:
        """The logits of a step without drafts, fp32 ``[N, V]``."""
        rows = batch.logit_rows
        at, tokens = (torch.from_numpy(a[rows]) for a in (batch.positions, batch.input_ids))
        return _model_logits(at, tokens, self.vocab_size)

    def _run(
        self, calls: Mapping[str, Sequence[BoundCall]], plan: Plan, values: Values, variant: str
    ) -> None:
        positions, tokens, rows = (values[k] for k in ("positions", "input_ids", "logit_rows"))
        if plan is self._plan:
            logits = _model_logits(positions[rows], tokens[rows], self.vocab_size)
        else:
            assert self.drafter is not None
            first, carried = plan is self._manifest.plans[DRAFT], self.drafter.carried
            self._depth = 1 if first else self._depth + 1
            made = drafted(positions + 1, tokens)
            for key in carried if first else self.drafter.states:
                ahead = self._depth - 1 if key not in carried else 0 if first else 1
                made = torch.where(values[key][:, 0] == positions - ahead, made, made + 2)
            logits = torch.zeros(len(rows), self.vocab_size).scatter_(1, made[rows, None], 99.0)
        values |= {LOGITS: logits, **self._states(positions)}

    def _step(self, tensors: dict[str, Tensor], variant: str) -> Tensor:
        self._run(self._calls, self._plan, tensors, variant)
        return tensors[LOGITS]

    def _states(self, positions: Tensor) -> dict[str, Any]:
        states = {} if self.drafter is None else self.drafter.states
        return {
            key: positions.view(-1, *(1,) * (kept.dim() - 1))
            .expand(-1, *kept.shape[1:])
            .to(torch.float64 if kept.dtype.is_floating_point else kept.dtype)
            for key, kept in states.items()
        }


def _model_logits(positions: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    found = followers(positions, tokens)[:, None]
    logits = torch.zeros(len(tokens), vocab_size).sub_(40.0)
    logits[:, _FIRST : _FIRST + _TOKENS] = -_AHEAD
    return logits.scatter_(1, found, 0.0)
