"""Prompts and decoding requests in one step through graphs, on a CPU that stands in for a GPU."""

import numpy as np
import pytest
import torch

from dsa_compile.ir.plan import SHORT
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.execution.graph_plan import GraphPlan
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.replayed_calls import replay_calls


class HostRing:
    """A staging ring between two places in the host's memory."""

    def take_views(self, layout):
        self.host = np.full(layout.nbytes, 0xA5, np.uint8)
        return layout.in_numpy(self.host)

    def send(self, target):
        target.copy_(torch.from_numpy(self.host))

    def upload(self, arrays, device):
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}


@pytest.fixture
def replayed(monkeypatch):
    replay_calls(monkeypatch)


def test_tokens_are_those_of_steps_without_graphs(case, replayed):
    """Chunks alone and beside decoding requests, short and long, of all sizes that pad to 32."""
    c = case("grouped-4-layers")
    options = EngineOptions(num_gpu_blocks_override=128, max_num_seqs=8, max_num_batched_tokens=32)
    prompts = c.prompts([3, c.topk, 40, 2 * c.topk + 5, 17, 90, 31, 64, 12])
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    tokens = []
    for captured in (False, True):
        runner = load_runner(c.artifact, options)
        if captured:
            runner._ring = HostRing()
            plan = GraphPlan.of(
                mixed_tokens=(16, 32),
                max_num_seqs=8,
                max_model_len=runner.max_model_len,
                block_size=runner.block_size,
                topk=c.topk,
            )
            runner.capture(plan)
        engine = Engine(runner, options)
        tokens.append([out.token_ids for out in engine.generate(prompts, params)])
    assert tokens[0] == tokens[1]
    counts = engine.stats().step_counts
    assert {kind.variant for kind in counts if kind.graph == "32 tokens"} >= {SHORT, "long"}
    assert sum(count for kind, count in counts.items() if "tokens" in kind.graph) >= 9


def test_tokens_that_only_the_device_knows_are_put_in(case, replayed):
    """Decoding requests whose last tokens a step in flight yields."""
    from .test_padding import prefilled, step

    c = case("grouped-4-layers")
    results = []
    for known in (True, False):
        runner, pages = prefilled(c, [5, 40])
        runner.token_buffer[torch.tensor([7, 2])] = torch.tensor([9, 11])
        if not known:
            runner._ring = HostRing()
            width = runner.max_model_len
            columns = {"short": (width,), "long": (width,)}
            runner.capture(GraphPlan((4,), columns, mixed_tokens=(8,)))
        tokens = [[9 if known else -1], [4, 5, 6, 11 if known else -1]]
        results.append(runner.execute(step(runner, tokens, [0, pages], [5, 40], [7, 2])))
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
