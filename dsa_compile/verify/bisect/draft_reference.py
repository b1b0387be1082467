"""Drafts of the finished draft plans without the runtime, exact or as the recipe rounds.

The definition of drafting, over a request whose tokens are all known: the draft layer runs once
along them, each position with the model's state there and the token behind it. From each position a
chain follows, every draft made of the one before and of the state behind that, and where deeper
drafts have no indexer, over the keys that the first one of the chain selected.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsa_compile.ir.plan import DEEPER, DRAFT, LONG, MODEL, Call, Plan
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role, open_values
from dsa_compile.verify.execution.exact import numbers
from dsa_compile.verify.execution.stages import Stage, caches_for, result_nodes, weight_keys
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.parameters import WeightStore
from dsa_compile.verify.inputs.prompt import Chunk, Part, Prompt

LOGITS = "logits"
TIE = 1e-6
"""Two drafts whose logits are closer may both be made where arithmetic is exact."""

Tokens = tuple[int, ...]
Values = dict[str, Tensor]


class DraftReference:
    """Draft plans of a program, run request by request.

    Args:
        program: finished, with draft plans.
        store: gives the weights; exact ones make exact arithmetic.
        block_size: rows of a cache page.
    """

    def __init__(
        self, program: Program, store: WeightStore | ExactWeightStore, block_size: int
    ) -> None:
        self._program, self._block_size = program, block_size
        self._stage = Stage.of(program, store)
        first, deeper = (
            open_values(program.region(call.kind, LONG) for call in program.plans[name].calls)
            for name in (DRAFT, DEEPER)
        )
        self._carried, self._handed = list(first), list(deeper)

    def chains(self, ids: Tokens, first: int, depth: int) -> dict[int, Tokens]:
        """Drafts behind each last token of a request.

        Args:
            ids: its tokens, as they are known in the end.
            first: the lowest position of a last token, >= 1.
            depth: drafts of a chain.

        Returns:
            By the position of the last token; a chain ends where its next draft is a tie.
        """
        return {
            end: _before_a_tie(logits) for end, logits in self.logits(ids, first, depth).items()
        }

    @torch.no_grad()
    def logits(
        self, ids: Tokens, first: int, depth: int, drafts: Mapping[int, Tokens] | None = None
    ) -> dict[int, Tensor]:
        """Logits of every draft of the chains, fp64 ``[depth, V]`` each.

        Args:
            ids: as for :meth:`chains`.
            first: likewise.
            depth: likewise.
            drafts: those that were made, by the position of the last token: the next ones are made
                from them. Where there are none, from the likeliest.
        """
        room = (*ids, *(0,) * depth)  # for the rows of the last chain
        whole = Prompt((room,), (Chunk((Part(0, 0, len(ids)),)),), self._block_size)
        caches: dict[str, Values] = {}
        batch = whole.batch(whole.chunks[0], flat=True)
        values = self._run(self._program.plans[MODEL], batch, {}, whole, caches)
        shifted = batch | {"input_ids": torch.tensor([*ids[1:], 0])}
        made = self._run(self._program.plans[DRAFT], shifted, values, whole, caches)
        logits = numbers(made[LOGITS])
        found = {}
        # from the last on: a chain overwrites the rows behind its start, which no earlier one reads
        for end in range(len(ids) - 1, first - 1, -1):
            state = {key: made[key][end - 1 : end] for key in self._handed}
            made_there = (drafts or {}).get(end, ())
            given = torch.tensor(made_there[:depth], dtype=torch.int64)
            found[end] = self._chain(logits[end - 1], state, end, depth, given, whole, caches)
        return found

    def _chain(
        self,
        logits: Tensor,
        state: Values,
        end: int,
        depth: int,
        given: Tensor,
        whole: Prompt,
        caches: dict[str, Values],
    ) -> Tensor:
        found = [logits]
        for position in range(end, end + depth - 1):
            one = whole.batch(Chunk((Part(0, position, position + 1),)), flat=True)
            place = len(found) - 1
            token = given[place] if place < len(given) else found[-1].argmax()
            one |= {"input_ids": token[None]}
            values = self._run(self._program.plans[DEEPER], one, state, whole, caches)
            state |= {key: values[key] for key in self._carried}
            found.append(numbers(values[LOGITS])[0])
        return torch.stack(found).double()

    def _run(
        self,
        plan: Plan,
        batch: Mapping[str, Tensor],
        given: Values,
        whole: Prompt,
        caches: dict[str, Values],
    ) -> Values:
        values = dict(given)
        for call in plan.calls:
            values |= self._call(call, batch, values, whole, caches)
        return values

    def _call(
        self,
        call: Call,
        batch: Mapping[str, Tensor],
        values: Values,
        whole: Prompt,
        caches: dict[str, Values],
    ) -> Values:
        region = self._program.region(call.kind, LONG)
        own = caches.setdefault(call.caches or "", {})
        tables = {
            Role.VALUE: values,
            Role.BATCH: batch,
            Role.CACHE: caches_for(region, whole, own, self._stage.exact),
            Role.WEIGHT: self._stage.weights.of(call, weight_keys(region)),
        }
        nodes = self._stage.record(region, tables)
        return {name: nodes[node.name] for name, node in result_nodes(region).items()}


def _before_a_tie(logits: Tensor) -> Tokens:
    best = logits.topk(2)
    apart = (best.values[:, 0] - best.values[:, 1] > TIE).tolist()
    count = apart.index(False) if False in apart else len(apart)
    return tuple(best.indices[:count, 0].tolist())
