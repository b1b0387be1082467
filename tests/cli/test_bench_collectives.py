"""``dsa-bench collectives``: what it refuses, and its figures on several GPUs."""

import json

import pytest
import torch

from dsa_compile.cli.bench import build_parser, run
from dsa_compile.errors import UserError
from dsa_compile.measure.collectives import Timing, latency_table
from dsa_compile.runtime.ranks.latencies import Latency, read_latencies


def test_several_gpus_are_needed(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="needs 2 GPUs or more, and torch sees 1"):
        run(["collectives"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="torch sees 2; --ranks 4"):
        run(["collectives", "--ranks", "4"])


def test_rows_are_numbers() -> None:
    assert build_parser().parse_args(["collectives", "--rows", "1,16"]).rows == (1, 16)
    with pytest.raises(UserError, match="1 or more"):
        build_parser().parse_args(["collectives", "--rows", "0"])


def test_timings_are_a_table_to_replay(tmp_path) -> None:
    timings = [
        Timing("all_reduce", 1, 2, "nccl", 10.0),
        Timing("all_reduce", 1, 2, "symmetric", None, "ranks have other bits"),
    ]
    path = tmp_path / "table.json"
    machine = {"gpu": "GPU", "date": "2026-01-01", "torch": "2"}
    path.write_text(json.dumps(latency_table(timings, machine)))
    found = read_latencies(path).entries
    of_two = [e for e in found if (e.op, e.provider, e.ranks) == ("all_reduce", "nccl", 2)]
    assert of_two == [Latency("all_reduce", "nccl", 2, 14_336, 10.0)]
    assert {e.ranks for e in found} > {2}, "the package's others stay"


@pytest.mark.gpu(alone=True, count=2)
def test_every_result_is_right(capsys) -> None:
    assert run(["collectives", "--ranks", "2", "--rows", "1,73,74", "--norm", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ours = [t for t in found if t["provider"] == "symmetric"]
    for op in ("all_reduce", "all_gather", "all_reduce_add_rms_norm_quantize"):
        assert [t["rows"] for t in ours if t["op"] == op] == [1, 73]
    assert [t["rows"] for t in ours if t["op"] == "reduce_scatter"] == [74]  # 37 for each
    assert all(t["us"] > 0 for t in ours)
