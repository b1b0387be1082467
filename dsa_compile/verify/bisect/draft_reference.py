"""Drafts of the finished draft plans without the runtime, in exact arithmetic.

:mod:`dsa_compile.measure.eval.draft_chains` over a program: its graphs run by their references, and
pages of the caches are out of order.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsa_compile.ir.plan import LONG, Call
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Role
from dsa_compile.measure.eval.draft_chains import DraftChains, Tokens, Values
from dsa_compile.runtime.execution.model_steps import LOGITS
from dsa_compile.verify.execution.exact import numbers
from dsa_compile.verify.execution.stages import Stage, caches_for, result_nodes, weight_keys
from dsa_compile.verify.inputs.exact_weights import ExactWeightStore
from dsa_compile.verify.inputs.prompt import Chunk, Part, Prompt

TIE = 1e-6
"""Two drafts whose logits are closer may both be made."""


class DraftReference:
    """Draft plans of a program, run request by request.

    Args:
        program: finished, with draft plans.
        store: gives the weights.
        block_size: rows of a cache page.
    """

    def __init__(self, program: Program, store: ExactWeightStore, block_size: int) -> None:
        self._program, self._block_size = program, block_size
        self._stage = Stage.of(program, store)

    @torch.no_grad()
    def chains(self, ids: Tokens, first: int, depth: int) -> dict[int, Tokens]:
        """Drafts behind each last token of a request.

        Args:
            ids: its tokens, as they are known in the end.
            first: the lowest position of a last token, >= 1.
            depth: drafts of a chain.

        Returns:
            By the position of the last token; a chain ends where its next draft is a tie.
        """
        room = (*ids, *(0,) * depth)  # for the rows of the last chain
        whole = Prompt((room,), (Chunk((Part(0, 0, len(ids)),)),), self._block_size)
        caches: dict[str, Values] = {}

        def run(plan: str, start: int, tokens: Tensor, given: Values) -> Values:
            chunk = Chunk((Part(0, start, start + len(tokens)),))
            batch = whole.batch(chunk, flat=True) | {"input_ids": tokens}
            values = dict(given)
            for call in self._program.plans[plan].calls:
                values |= self._call(call, batch, values, whole, caches)
            return values | {LOGITS: numbers(values[LOGITS]).double()}

        chains = DraftChains(self._program.plans, self._program.regions, run)
        found = chains.chains(ids, range(first, len(ids)), depth)
        return {end: _before_a_tie(chain.logits) for end, chain in found.items()}

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
