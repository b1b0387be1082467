"""One rank without the others: its weights, the shapes of its collectives, and what is refused."""

import json

import pytest
import torch

from dsa_compile.cli.generate import main as generate
from dsa_compile.errors import UserError
from dsa_compile.ops.collectives import (
    all_gather,
    all_gather_many,
    all_reduce,
    communicating,
    reduce_scatter,
)
from dsa_compile.runtime import Engine, SamplingParams
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.loading.load_parts import load_parts
from dsa_compile.runtime.ranks.latencies import read_latencies
from dsa_compile.runtime.ranks.replay import ReplayCommunicator

CPU = torch.device("cpu")


def test_collectives_have_the_shape_of_all_ranks() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with communicating(ReplayCommunicator(read_latencies(), CPU)):
        total, every = all_reduce(x, "tp", 4), all_gather(x, "tp", 4)
    assert torch.equal(total, x)
    assert total.data_ptr() != x.data_ptr()
    assert torch.equal(every, torch.cat([x] * 4, -1))
    with communicating(ReplayCommunicator(read_latencies(), CPU)):
        (rows,) = all_gather_many([x], "dp", 4)
        own = reduce_scatter(rows, "dp", 4)
    assert torch.equal(rows, torch.cat([x] * 4))
    assert torch.equal(own, x)


def test_a_sum_with_its_norm_is_one_kernel_of_ours_alone() -> None:
    found = ReplayCommunicator(read_latencies(), CPU)
    x = torch.randn(1, 7168).bfloat16()
    assert torch.equal(found.peer_memory("tp").sum_to_norm(x, 4), x)
    both, row = "all_reduce_add_rms_norm_quantize", 14_336
    assert found._us_of(both, 4, row) == found.estimate("all_reduce", 4, row).us
    found.replay("symmetric")
    assert found._us_of(both, 4, row) == pytest.approx(4.05, abs=0.01)
    assert found._us_of(both, 4, 64 * row) == found.estimate("all_reduce", 4, 64 * row).us


def test_tokens_of_other_lanes_choose_other_experts() -> None:
    indices = torch.tensor([[0, 5, 8], [7, 3, -1]])  # 8 experts, a shared one, and none
    with communicating(ReplayCommunicator(read_latencies(), CPU, 8)):
        (every,) = all_gather_many([indices], "dp", 2)
    assert every.tolist() == [[0, 5, 8], [7, 3, -1], [4, 1, 8], [3, 7, -1]]


@pytest.mark.slow
def test_a_rank_loads_its_part_of_the_weights(artifact) -> None:
    def weights(rank: int) -> dict[str, torch.Tensor]:
        options = EngineOptions(collectives="replay", rank=rank, num_gpu_blocks_override=8)
        runner = load_parts(artifact("tp2"), options)["runner"]
        return {
            f"{call} {key}": tensor
            for call, tensors in runner._runner._weights.items()
            for key, tensor in tensors.items()
        }

    first, second = weights(0), weights(1)
    assert {key: w.shape for key, w in first.items()} == {k: w.shape for k, w in second.items()}
    differ = {key.split()[1] for key in first if not torch.equal(first[key], second[key])}
    assert "self_attn.o_proj.weight" in differ
    assert not any("norm" in key for key in differ)


def test_a_rank_alone_generates_and_says_projected(artifact, capsys) -> None:
    options = [
        "--collectives",
        "replay",
        "--rank",
        "1",
        "--of",
        "2",
        "--num-gpu-blocks-override",
        "8",
    ]
    prompt = ["--prompt-ids", "5 6 7", "--max-tokens", "3", "--temperature", "0"]
    assert generate([str(artifact("tp2")), *options, *prompt]) == 0
    assert "projected: rank 1 ran without the others" in capsys.readouterr().out
    assert generate([str(artifact("tp2")), *options, *prompt, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["projected"] is True
    assert "projected" in shown.err


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("one", {"rank": 0}, r"rank 0 of an artifact of one rank; compile with --tp"),
        ("tp2", {"rank": 0, "ranks": 8}, r"rank 0 of 8 of an artifact of 2 ranks"),
        ("tp2", {"rank": 2}, r"rank=2 of 2 ranks: they count from 0"),
        ("tp2", {"rank": 0, "latencies": "/nowhere.json"}, r"/nowhere.json: No such file"),
    ],
)
def test_what_is_no_rank_of_the_artifact(artifact, layout, options, message) -> None:
    with pytest.raises(UserError, match=message):
        Engine.load(artifact(layout), collectives="replay", **options)


def test_a_replayed_engine_serves_many_requests(artifact) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    options = {"num_gpu_blocks_override": 13, "max_num_batched_tokens": 48}
    with Engine.load(artifact("ep2"), collectives="replay", rank=0, **options) as engine:
        assert "projected: rank 0 of 2 alone" in repr(engine)
        outputs = engine.generate([list(range(3, 90)), [5] * 14, [7, 8]], params)
    assert [output.num_tokens for output in outputs] == [5, 5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["mtp", "ngram"])
def test_a_replayed_lane_drafts(artifact, draft: str) -> None:
    """Replayed lane meets copies of itself, of the shape of its own step."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
    options = {
        "num_gpu_blocks_override": 13,
        "max_num_seqs": 4,
        "draft": draft,
        "num_speculative_tokens": 3,
    }
    name = "dp2ep2-mtp"
    with Engine.load(artifact(name), collectives="replay", rank=1, **options) as engine:
        outputs = engine.generate([list(range(3, 90)), [5] * 14], params)
        assert sum(engine.stats().drafted) > 0
    assert [output.num_tokens for output in outputs] == [9, 9]
