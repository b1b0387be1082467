"""Captured steps of both kinds against the step itself, with a call in place of a CUDA graph."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsa_compile.ir.plan import LONG
from dsa_compile.runtime.execution.batch import Batch
from dsa_compile.runtime.execution.captured_steps import CapturedSteps, StepParts
from dsa_compile.runtime.execution.graph_plan import GraphKey, GraphPlan
from dsa_compile.runtime.execution.plain_inputs import PlainInputs
from dsa_compile.runtime.scheduling.stats import StepKind
from tests.replayed_calls import replay_calls

SAMPLED = torch.tensor([70, 71, 72, 73])
"""The last token of each request row."""


@pytest.fixture(autouse=True)
def _calls_in_place_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    replay_calls(monkeypatch)


class Ring:
    """Sends what was written last."""

    def take_views(self, layout):
        self.host = np.full(layout.nbytes, 99, np.uint8)
        return layout.in_numpy(self.host)

    def send(self, target):
        target.copy_(torch.from_numpy(self.host))


def step(tensors, variant):
    """Logits that tell a token from any other and all of its request."""
    ids, rows = tensors["input_ids"], tensors.pop("token_rows")
    tensors["input_ids"] = torch.where(ids < 0, SAMPLED[rows.clamp_min(0)], ids)
    lengths = tensors["cu_seqlens"].diff()
    request = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    request = torch.nn.functional.pad(request, (0, len(tensors["input_ids"]) - len(request)))
    found = [tensors["input_ids"], tensors["positions"], tensors["slot_mapping"]]
    found += [tensors["context_lens"][request], tensors["block_tables"][request, 0]]
    return torch.stack(found, 1)[tensors["logit_rows"]].float()


PARTS = StepParts(PlainInputs, step, lambda key: 5, torch.float32, torch.device("cpu"), Ring())


def test_decode_steps_are_padded_and_every_request_has_its_logits() -> None:
    plan = GraphPlan((1, 2, 4), {LONG: (3,)})
    graphs = CapturedSteps(PARTS)
    graphs.capture(plan)
    batch = Batch(
        input_ids=np.array([5, -1, 7]),
        positions=np.array([11, 40, 0]),
        slot_mapping=np.array([3, 104, 64]),
        block_tables=np.array([[0, -1], [9, 1], [2, -1]], np.int32),
        cu_seqlens=np.arange(4, dtype=np.int32),
        context_lens=np.array([12, 41, 1], np.int32),
        logit_rows=np.array([0, 2]),
        request_rows=np.array([2, 3, 0], np.int32),
        tokens_each=1,
    )
    logits, _ = graphs.launch(graphs.choose(batch, LONG), batch)
    assert logits[:3].tolist() == [[5, 11, 3, 12, 0], [73, 40, 104, 41, 9], [7, 0, 64, 1, 2]]
    assert graphs.steps == {StepKind("4", LONG): 1}
    assert logits[3].tolist() == [0, 0, -1, 0, -1], "a padded row owns nothing"


def test_what_no_graph_takes_runs_without_one() -> None:
    graphs = CapturedSteps(PARTS)
    plan = GraphPlan((1,), {LONG: (1, 2)})
    graphs.capture(plan, [GraphKey(LONG, 1, 1)])
    wide = SimpleNamespace(num_requests=1, block_tables=np.zeros((1, 3)), tokens_each=1)
    assert graphs.choose(wide, LONG) is None
    planned = SimpleNamespace(num_requests=1, block_tables=np.zeros((1, 2)), tokens_each=1)
    assert graphs.choose(planned, LONG) is None, "it is not captured yet"
    narrow = SimpleNamespace(num_requests=1, block_tables=np.zeros((1, 1)), tokens_each=1)
    assert graphs.choose(narrow, LONG) == GraphKey(LONG, 1, 1)
    graphs.drop()
    assert graphs.choose(narrow, LONG) is None


def test_graphs_of_another_plan_take_the_place_of_the_first_ones() -> None:
    """Graphs of one plan read the same inputs; those of a larger one need more room."""
    graphs = CapturedSteps(PARTS)
    for rows in (2, 4):
        graphs.capture(plan := GraphPlan((rows,), {LONG: (3,)}))
        assert graphs.plan == plan
        assert [key.rows for key in graphs._captured] == [rows]
    inputs = graphs._inputs.data_ptr()
    graphs.capture(plan, [GraphKey(LONG, 4, 3)])
    assert graphs._inputs.data_ptr() == inputs


def test_steps_with_prompts_have_the_logits_that_are_wanted() -> None:
    plan = GraphPlan((2, 4), {LONG: (3,)}, mixed_tokens=(8,))
    graphs = CapturedSteps(PARTS)
    graphs.capture(plan)
    batch = Batch(
        input_ids=np.array([-1, 21, 22, 23, 24]),
        positions=np.array([30, 0, 1, 2, 3]),
        slot_mapping=np.array([94, 128, 129, 130, 131]),
        block_tables=np.array([[1], [2]], np.int32),
        cu_seqlens=np.array([0, 1, 5], np.int32),
        context_lens=np.array([31, 4], np.int32),
        logit_rows=np.array([0, 4]),
        request_rows=np.array([1, 2], np.int32),
    )
    logits, _ = graphs.launch(graphs.choose(batch, LONG), batch)
    assert logits.tolist() == [[71, 30, 94, 31, 1], [24, 3, 131, 4, 2]]
    assert graphs.steps == {StepKind("8 tokens", LONG): 1}
