"""``dsa-bench node``: a load on all ranks, and projected from one of them."""

import json

import pytest
import torch

from dsa_compile.cli.bench import build_parser, run
from dsa_compile.cli.tables import console, fits
from dsa_compile.errors import UserError
from dsa_compile.inspect.ranks import exchanges
from dsa_compile.inspect.store import Store
from dsa_compile.measure.node.report import basis_lines, node_table, published_table
from dsa_compile.measure.node.run import Collectives, Row, step_communication
from dsa_compile.measure.node.workload import Load, Served
from dsa_compile.runtime.ranks.latencies import Latency, LatencyTable

LOAD = ["--concurrency", "2", "--prompt-tokens", "20", "--new-tokens", "6"]


@pytest.mark.slow
def test_a_projection_says_so_everywhere(artifact, capsys, tmp_path) -> None:
    output = tmp_path / "node.json"
    replay = ["--collectives", "replay", "--of", "2", "--scale", "0,1"]
    arguments = ["node", str(artifact("tp2")), *replay, *LOAD, "-o", str(output)]
    assert run(arguments) == 0
    shown = capsys.readouterr()
    assert "projected: rank 0 of 2 alone, collectives replayed" in shown.out
    assert "projected" in shown.err
    data = json.loads(output.read_text())
    assert data["projected"] is True
    assert data["machine"]["torch"] == torch.__version__
    assert data["command"]
    assert [row["projected"] for row in data["rows"]] == [True, True]
    without, with_latencies = data["rows"]
    assert without["communication_ms"] == 0 < with_latencies["communication_ms"]
    assert with_latencies["served"]["steps"] > 1


def test_a_lane_alone_serves_its_share(artifact, capsys, monkeypatch) -> None:
    """The longer of two lanes has 3 of 5 requests; rates are of all 5."""
    loads = []

    def served(engine, load):
        loads.append((load.concurrency, engine._runner.runner.max_num_seqs))
        return Served(1.0, 2.0, 3, 4.0)

    monkeypatch.setattr("dsa_compile.measure.node.run.serve", served)
    replay = ["--collectives", "replay", "--scale", "1", "--json"]
    arguments = ["node", str(artifact("dp2ep2")), *replay, "--concurrency", "5", *LOAD[2:]]
    assert run(arguments) == 0
    assert loads == [(3, 3)]
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["load"]["concurrency"] == 5
    assert row["tokens_per_gpu"] == pytest.approx(1e3 / 2 * 5 / 2)


@pytest.mark.slow
def test_all_ranks_are_measured(artifact, capsys) -> None:
    assert run(["node", str(artifact("tp2")), *LOAD, "--json"]) == 0
    shown = capsys.readouterr()
    assert "measured: 2 ranks" in shown.err
    data = json.loads(shown.out)
    assert (data["projected"], data["ranks"]) == (False, 2)
    assert [row["collectives"]["scale"] for row in data["rows"]] == [None]


def test_tables_fit_80_columns(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    served = Served(12345.6, 123.456, 1000, 100.0)
    load = Load(256, 131_072, 1024)
    row = Row(load, Collectives("torch two-shot", 1.25), served, 8, 12.3)
    assert row.tokens_per_gpu == pytest.approx(256 / 0.123456 / 8)
    assert row.output_per_gpu == pytest.approx(256 * 1024 / 100 / 8)
    assert fits(console(), node_table([row], "projected"))
    assert fits(console(), published_table())


def test_collectives_of_a_step_are_added_up(artifact) -> None:
    """Two sums a layer of four bytes a value, the columns of the embedding and the logits."""
    table = LatencyTable(
        [Latency("all_reduce", "nccl", 2, 4, 3.0), Latency("all_gather", "nccl", 2, 4, 5.0)]
    )
    found = exchanges(Store.open(artifact("tp2")))
    sizes = [(each.calls, m) for each in found for m in each.messages]
    want = sum(
        calls * (3.0 if m.op.startswith("all_reduce") else 5.0) * m.row_bytes * 7 / 4
        for calls, m in sizes
    )
    got = step_communication(found, table, "nccl", 7)
    assert (got.us, got.basis) == (pytest.approx(want), "measured")
    assert step_communication(found, LatencyTable([]), "nccl", 7) is None


def test_latencies_of_other_numbers_of_ranks_are_named() -> None:
    served = Served(1.0, 1.0, 10, 1.0)
    rows = [
        Row(Load(1, 8, 8), Collectives(name, 1.0), served, 8, 0.1, basis)
        for name, basis in [("nccl", "measured"), ("symmetric", "extrapolated")] * 2
    ]
    line = "symmetric: latencies extrapolated from other numbers of ranks"
    assert basis_lines(rows) == [line]


@pytest.mark.parametrize("given", [["--scale", "-1"], ["--concurrency", "0"], ["--scale", "x"]])
def test_numbers_that_are_none(given) -> None:
    with pytest.raises(UserError):
        build_parser().parse_args(["node", "a", *given])


def test_a_time_between_tokens_needs_some() -> None:
    with pytest.raises(UserError, match="give 3 or more"):
        run(["node", "nowhere", "--new-tokens", "2"])


def test_a_provider_is_checked_before_anything_is_loaded() -> None:
    with pytest.raises(UserError, match="collectives of 'x' were not measured; the table has nccl"):
        run(["node", "nowhere", "--collectives", "replay", "--provider", "x"])


def test_a_profile_needs_one_rank_on_a_gpu(artifact) -> None:
    with pytest.raises(UserError, match="one rank alone: give --collectives replay"):
        run(["node", "nowhere", "--by-op"])
    with pytest.raises(UserError, match="is for a CPU"):
        run(["node", str(artifact("tp2")), "--collectives", "replay", "--by-op"])
