"""Tokens of routed experts, counted where they are computed: the same on every layout."""

import pytest
import torch
from torch import fx

from dsa_compile.ir.region import Region, Role
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.execution.expert_counts import ExpertCounts
from dsa_compile.runtime.scheduling.stats import Busiest, busiest

dsa = torch.ops.dsa

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(3, 70)), [7, 8, 9]]
LAYERS, CHOSEN, EXPERTS = (2, 3, 4), 4, 16
COMPUTED = sum(len(prompt) + GREEDY.max_tokens - 1 for prompt in PROMPTS)


def counted(path, **options) -> dict[int, tuple[int, ...]]:
    with Engine.load(
        path, num_gpu_blocks_override=32, max_num_batched_tokens=48, **options
    ) as engine:
        engine.generate(PROMPTS, GREEDY)
        return dict(engine.stats().expert_tokens)


@pytest.fixture(scope="module")
def alone(artifact) -> dict[int, tuple[int, ...]]:
    return counted(artifact("one"), count_experts=True, max_num_seqs=4)


def test_every_token_is_counted_for_the_experts_that_it_chose(alone) -> None:
    assert tuple(alone) == LAYERS
    for tokens in alone.values():
        assert len(tokens) == EXPERTS
        assert sum(tokens) == COMPUTED * CHOSEN
        assert max(tokens) <= COMPUTED


def test_nothing_is_counted_unless_wanted(artifact) -> None:
    assert counted(artifact("one")) == {}


@pytest.mark.slow
def test_ranks_count_the_tokens_of_all(artifact, alone) -> None:
    assert counted(artifact("ep2"), count_experts=True) == alone
    with_padding = counted(artifact("dp2ep2"), count_experts=True)
    for layer, tokens in alone.items():
        assert all(b >= a for a, b in zip(tokens, with_padding[layer], strict=True))


@pytest.mark.parametrize("placed", [False, True])
def test_choices_are_counted_by_the_numbers_of_all_experts(placed: bool) -> None:
    graph = fx.Graph()
    names = ("slot_mapping", "x", "weights", "indices", "places", "gate_up", "down")
    _, x, weights, indices, places, gate_up, down = map(graph.placeholder, names)
    for node in graph.nodes:
        node.meta = {"role": Role.BATCH, "key": node.name}
    own = graph.call_function(dsa.place_experts.default, (indices, places)) if placed else indices
    graph.call_function(dsa.experts.default, (x, weights, own, gate_up, down))
    chosen = torch.tensor([[0, 3], [2, 3], [1, 2], [4, 0], [-1, -1]])  # 4 is a shared expert
    slots = torch.tensor([7, 8, -1, 9, -1])  # two tokens of padding
    counts = ExpertCounts((5, 9), experts=5, routed=4, device=torch.device("cpu"))
    calls = [node for node in graph.nodes if node.op == "call_function"]
    functions = [(counts.counting(node, lambda *_: None), len(node.args)) for node in calls]

    def layer(*_: torch.Tensor) -> tuple[()]:
        for function, count in functions:
            function(*[chosen] * count)
        return ()

    region = Region("moe", graph, ())
    counts.within(9, region)(layer)(slots, *[chosen] * 6)
    assert counts.tokens() == {5: (0, 0, 0, 0), 9: (2, 0, 1, 2)}
    counts.reset()
    assert counts.tokens()[9] == (0, 0, 0, 0)


def test_the_busiest_expert_and_rank() -> None:
    assert busiest([1, 5, 4, 2]) == Busiest(1, 5 / 3)
    assert busiest([1, 5, 4, 2], ranks=2) == Busiest(0, 1.0)
    assert busiest([1, 5, 7, 2], ranks=2) == Busiest(1, 1.2)
    assert busiest([0, 0], ranks=2) == Busiest(0, 1.0)
