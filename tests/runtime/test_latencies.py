"""Times of collectives between the measured sizes and numbers of ranks."""

import json
import re
from pathlib import Path

import pytest

from dsa_compile.errors import UserError
from dsa_compile.runtime import EngineOptions
from dsa_compile.runtime.ranks.latencies import Estimate, Latency, LatencyTable, read_latencies

ROW = 14_336
TABLE = LatencyTable(
    [
        Latency("all_reduce", "nccl", ranks, size, us)
        for ranks, points in {2: [(100, 10.0), (300, 20.0)], 8: [(100, 30.0), (300, 60.0)]}.items()
        for size, us in points
    ]
    + [Latency("all_reduce", "symmetric", 2, size, us) for size, us in [(100, 4.0), (900, 8.0)]]
)


@pytest.mark.parametrize(
    ("ranks", "nbytes", "us", "basis"),
    [
        (2, 100, 10.0, "measured"),
        (2, 200, 15.0, "measured"),
        (2, 1, 10.0, "measured"),
        (2, 500, 30.0, "measured"),  # at the bandwidth of the two largest
        (4, 100, 20.0, "interpolated"),
        (8, 300, 60.0, "measured"),
        (15, 100, 45.0, "extrapolated"),  # as 8 ranks with twice the bytes
    ],
)
def test_sizes_and_ranks_between_the_measured_ones(ranks, nbytes, us, basis) -> None:
    found = TABLE.estimate("all_reduce", "nccl", ranks, nbytes)
    assert found == Estimate(pytest.approx(us), "nccl", basis)


def test_what_a_provider_leaves_to_nccl() -> None:
    assert TABLE.lookup("all_reduce", "symmetric", 2, 900).us == 8.0
    assert TABLE.lookup("all_reduce", "symmetric", 2, (1 << 20) + 16).provider == "nccl"
    assert TABLE.lookup("all_reduce", "other", 2, 100) == TABLE.lookup("all_reduce", "nccl", 2, 100)
    assert TABLE.lookup("all_gather", "symmetric", 2, 100) is None


def test_a_norm_behind_a_sum_is_the_same_kernel_for_few_rows() -> None:
    normed = Latency("all_reduce_add_rms_norm_quantize", "symmetric", 4, ROW, 4.6)
    table = LatencyTable([*TABLE.entries, normed])
    assert table.lookup_normed("symmetric", 4, ROW).us == 4.6
    assert table.lookup_normed("symmetric", 8, ROW).basis == "extrapolated"
    assert table.lookup_normed("nccl", 4, ROW) is None
    assert table.lookup_normed("symmetric", 4, 64 * ROW) is None
    assert TABLE.lookup_normed("symmetric", 4, ROW) is None


def test_gathered_and_scattered_rows_are_of_the_provider_that_was_measured() -> None:
    nccl = [Latency(op, "nccl", 2, ROW, 11.0) for op in ("all_gather", "reduce_scatter")]
    ours = [Latency(op, "symmetric", 2, ROW, 4.0) for op in ("all_gather", "reduce_scatter")]
    table, most = LatencyTable([*nccl, *ours]), 1 << 20
    for op, largest in (("all_gather", most), ("reduce_scatter", 2 * most)):  # a share of it
        assert LatencyTable(nccl).lookup(op, "symmetric", 2, ROW).provider == "nccl"
        assert table.lookup(op, "symmetric", 2, ROW) == Estimate(4.0, "symmetric", "measured")
        assert table.lookup(op, "symmetric", 2, largest).provider == "symmetric"
        assert table.lookup(op, "symmetric", 2, largest + 32).provider == "nccl"


def test_the_rule_beyond_measured_ranks_holds_where_both_were_measured() -> None:
    """Torch's one-shot all-reduce of a row, from two GPUs to eight, within a fifth."""
    entries = read_latencies().entries  # our own kernels work alike
    two = LatencyTable([e for e in entries if e.provider == "torch one-shot" and e.ranks == 2])
    eight = next(
        e for e in entries if (e.provider, e.ranks, e.nbytes) == ("torch one-shot", 8, ROW)
    )
    found = two.estimate("all_reduce", "torch one-shot", 8, ROW)
    assert found.basis == "extrapolated"
    assert found.us == pytest.approx(eight.us, rel=0.2)


def test_the_table_of_the_package_says_where_it_comes_from() -> None:
    from dsa_compile.runtime.ranks.latencies import TABLE as path

    for machine in json.loads(path.read_text())["machines"]:
        assert {"machine", "date", "versions", "note", "entries"} <= machine.keys()
    table = read_latencies()
    for op in ("all_reduce", "all_gather", "reduce_scatter"):
        for ranks in (2, 8):
            assert table.estimate(op, "nccl", ranks, ROW).basis == "measured"


def test_a_file_stands_in_for_what_it_measured(tmp_path) -> None:
    entry = {"op": "all_reduce", "provider": "nccl", "ranks": 2, "bytes": ROW, "us": 1.5}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"machines": [{"entries": [entry]}]}))
    given, package = read_latencies(path), read_latencies()
    assert given.estimate("all_reduce", "nccl", 2, ROW).us == 1.5
    for other in (("all_reduce", "nccl", 8), ("all_reduce", "symmetric", 2)):
        assert given.estimate(*other, ROW) == package.estimate(*other, ROW)


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("|")]
    cells = [cell.strip().replace(",", "") for row in rows for cell in row.split("|")]
    shown = [float(cell) for cell in cells if re.fullmatch(r"[0-9.]+", cell)]
    for entry in read_latencies().entries:
        assert any(us == pytest.approx(entry.us, rel=0.006) for us in shown), entry


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no table of collectives' latencies"),
        ('{"machines": []}', "has no measurement"),
        ('{"machines": [{"entries": [{"op": "x"}]}]}', "no table"),
        (
            '{"machines": [{"entries": [{"op": "x", "provider": "nccl", "ranks": 1, "bytes": 2, '
            '"us": 3}]}]}',
            "ranks and bytes",
        ),
        (
            '{"machines": [{"entries": [{"op": "x", "provider": "nccl", "ranks": 2, "bytes": 2, '
            '"us": 0}]}]}',
            "us of",
        ),
    ],
)
def test_a_file_that_is_no_table(tmp_path, content, message) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_latencies(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collectives": "replay"}, "give its number, rank"),
        ({"rank": 0}, "rank: of a rank without the others"),
        ({"latencies": "x.json", "ranks": 2}, "ranks and latencies: of a rank"),
        ({"collectives": "replay", "rank": -1}, "rank must be an integer >= 0"),
        ({"collectives": "replay", "rank": 0, "ranks": 1}, "ranks must be an integer >= 2"),
    ],
)
def test_options_that_do_not_fit(options, message) -> None:
    with pytest.raises(UserError, match=message):
        EngineOptions(**options)
