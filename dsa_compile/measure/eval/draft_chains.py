"""The definition of drafting, over a request whose tokens are all known.

The draft layer runs once along the tokens, each position with the model's state there and the token
after it. From each position a chain follows, every draft made of the one before and of the state
that made it, and where deeper drafts have no indexer, over the keys that the first one of the chain
selected. Nothing is scheduled, batched or verified: this is what a runtime is held to.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsa_compile.errors import UserError
from dsa_compile.ir.execution import run_calls
from dsa_compile.ir.plan import DEEPER, DRAFT, LONG, MODEL, Plan, region_name
from dsa_compile.ir.region import Region, open_values
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.measure.eval.loaded_artifact import LoadedArtifact
from dsa_compile.runtime.execution.batch import lay_out
from dsa_compile.runtime.execution.model_runner import ModelRunner
from dsa_compile.runtime.execution.model_steps import LOGITS

Tokens = tuple[int, ...]
Values = dict[str, Tensor]
Run = Callable[[str, int, Tensor, Values], Values]
"""Runs a plan on tokens from a position on, with the values that other plans hand on; gives all
values, ``[T, …]``, over the caches that earlier calls left."""


@dataclass(frozen=True)
class Chain:
    """Drafts after the last token of a request.

    Attributes:
        logits: ``[depth, V]``.
        states: by depth, what goes on to the next draft, ``[1, …]`` each.
    """

    logits: Tensor
    states: list[Values]


class DraftChains:
    """Draft plans along requests.

    Args:
        plans: of a program or artifact.
        regions: its graphs by name.
        run: runs the plans.

    Attributes:
        carried: names of the values that go from draft to draft.
    """

    def __init__(self, plans: Mapping[str, Plan], regions: Mapping[str, Region], run: Run) -> None:
        self._run = run
        self.carried, self._handed = (
            tuple(open_values(
                regions[region_name(regions, call.kind, LONG)] for call in plans[name].calls
            ))
            for name in (DRAFT, DEEPER)
        )  # fmt: skip

    def along(self, ids: Tokens) -> tuple[Tensor, Values]:
        """Run the model and the draft layer along a request of n tokens.

        Returns:
            The model's logits ``[n, V]``, and the values of the first drafts: row i is of the draft
            for position i + 2, and the last one has no token to start from.
        """
        values = self._run(MODEL, 0, torch.tensor(ids), {})
        logits = values[LOGITS]
        return logits, self._run(DRAFT, 0, torch.tensor([*ids[1:], 0]), values)

    def chains(self, ids: Tokens, ends: Iterable[int], depth: int) -> dict[int, Chain]:
        """Drafts after last tokens of a request.

        Args:
            ids: its tokens, as they are known in the end.
            ends: positions of last tokens, >= 1.
            depth: drafts of a chain.

        Returns:
            By the position of the last token.
        """
        first = self.along(ids)[1]
        # from the last on: a chain overwrites the rows after its start, which no earlier one reads
        return {end: self._chain(first, end, depth) for end in sorted(ends, reverse=True)}

    def _chain(self, first: Values, end: int, depth: int) -> Chain:
        row = slice(end - 1, end)
        taken = {key: first[key][row] for key in self._handed}
        logits = [first[LOGITS][row]]
        states = [{key: first[key][row] for key in self.carried}]
        for position in range(end, end + depth - 1):
            values = self._run(DEEPER, position, logits[-1].argmax(-1), taken)
            states.append({key: values[key] for key in self.carried})
            taken = taken | states[-1]
            logits.append(values[LOGITS])
        return Chain(torch.cat(logits), states)


def chains_of(loaded: LoadedArtifact, max_tokens: int) -> DraftChains:
    """Chains of an artifact's draft plans, as its graphs and kernels compute them.

    An artifact without draft plans is compiled once more, with them.

    Args:
        loaded: the artifact.
        max_tokens: of a request, with the drafts after it.

    Raises:
        UserError: its model cannot draft.
    """
    if not loaded.spec.num_nextn_predict_layers:
        raise UserError("num_nextn_predict_layers 0: the model cannot draft")
    if DRAFT not in loaded.manifest.plans:
        loaded = with_draft_plans(loaded)
    manifest = loaded.manifest
    size = manifest.block_size
    blocks = -(-max_tokens // size)
    runner = ModelRunner(manifest, loaded.regions, loaded.weights, blocks)
    calls = {
        name: runner._bound(loaded.regions, plan)[LONG] for name, plan in manifest.plans.items()
    }

    @torch.inference_mode()
    def run(plan: str, start: int, tokens: Tensor, given: Values) -> Values:
        count, table = np.array([len(tokens)]), np.arange(blocks, dtype=np.int32)[None]
        batch = lay_out(tokens.cpu().numpy(), np.array([start]), count, table, size, count)
        values = given | runner._to_device(batch)
        run_calls(calls[plan], values)
        return values

    return DraftChains(manifest.plans, loaded.regions, run)


def with_draft_plans(loaded: LoadedArtifact) -> LoadedArtifact:
    """The same model compiled with the same options and draft plans."""
    changes: dict[str, Any] = {"draft": "mtp", "weights": "reference", "records": False}
    options = replace(loaded.manifest.compile, **changes, added_passes=())
    with TemporaryDirectory(prefix="dsa-eval-") as folder:
        path = f"{folder}/artifact"
        compile_model(loaded.model_dir, path, options=options)
        return LoadedArtifact.open(path, loaded.model_dir, loaded.name)
