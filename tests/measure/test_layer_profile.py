"""A step cut into layers and kernels, on made-up work."""

import json

import pytest

from dsa_compile.cli.tables import console, fits
from dsa_compile.measure.node.layer_profile import mean, step_profile
from dsa_compile.measure.node.report import layer_table, profile_line
from dsa_compile.measure.step.timeline import OTHER, Work

REPLAY = "replay_collective"
STEP = [
    Work("copy", 0, 2),
    Work("gather", 3, 5, "embed: embedding", 0, 7),
    # a layer: a projection, one beside it, and a sum of two kernels
    Work("gemm", 5, 10, "moe: linear q", 1, 64),
    Work("weights", 6, 9, "moe: weights i", 2, 8),
    Work(REPLAY, 9, 14, "moe: sum norm", 3, 1),
    Work("norm", 13, 16, "moe: sum norm", 3, 1),
    # the next of its kind, whose side stream starts first
    Work("weights", 16, 17, "moe: weights i", 5, 8),
    Work("gemm", 18, 22, "moe: linear q", 4, 64),
    Work(REPLAY, 22, 27, "moe: sum norm", 6, 1),
    Work("norm", 27, 28, "moe: sum norm", 6, 1),
]
NUMBERS = {"moe": [3, 4]}


def profile(step=STEP, repeated=None):
    return step_profile("projected", 0.03, step, NUMBERS, repeated or {})


def test_a_step_is_cut_into_layers() -> None:
    found = profile()
    assert [(layer.kind, layer.layer) for layer in found.layers] == [
        ("embed", None),
        ("moe", 3),
        ("moe", 4),
    ]
    _, first, second = found.layers
    assert [(part.op, part.kernel, part.number) for part in first.parts] == [
        ("linear q", "gemm", 0),
        ("weights i", "weights", 0),
        ("sum norm", REPLAY, 0),
        ("sum norm", "norm", 1),
    ]
    assert [(part.start, part.end, part.gap, part.added) for part in first.parts] == [
        (0, 5, 0, 5),
        (1, 4, 0, 0),
        (4, 9, 0, 4),
        (8, 11, 0, 2),
    ]
    assert (first.us, first.gaps, first.collectives) == (11, 0, 4)
    assert [part.kernel for part in second.parts] == ["weights", "gemm", REPLAY, "norm"]
    assert (second.us, second.gaps, second.collectives) == (12, 1, 5)


def test_layers_and_the_rest_add_up_to_the_step() -> None:
    found = profile()
    assert found.rest_us == 2
    assert sum(layer.us for layer in found.layers) + found.rest_us == 28
    assert found.traced_ms == pytest.approx(0.028)


def test_a_mean_adds_up_too() -> None:
    embed, moe = profile().means
    assert (embed.kind, embed.us) == ("embed", 3)
    assert (moe.layer, moe.us, moe.gaps, moe.collectives) == (None, 11.5, 0.5, 4.5)
    assert [part.kernel for part in moe.parts] == ["weights", "gemm", REPLAY, "norm"]
    assert [part.added for part in moe.parts] == [0.5, 4.5, 4.5, 1.5]
    assert (moe.parts[1].start, moe.parts[1].end) == (1, 5.5)


def test_a_kernel_that_one_layer_lacks_counts_there_as_nothing() -> None:
    *_, first, second = profile([work for work in STEP if work.span != 5]).layers
    both = mean([first, second])
    assert both.us == (first.us + second.us) / 2
    (weights,) = (part for part in both.parts if part.kernel == "weights")
    assert (weights.start, weights.added) == (1, 0)


def test_an_op_that_stands_twice_in_its_region() -> None:
    step = [Work("k", 2 * i, 2 * i + 1, "moe: copy", i) for i in range(4)]
    layers = profile(step, {"moe: copy": 2}).layers
    assert [(layer.layer, len(layer.parts)) for layer in layers] == [(3, 2), (4, 2)]
    assert [part.number for part in layers[0].parts] == [0, 1]


def test_nothing_ran() -> None:
    assert profile([]).layers == ()
    assert profile([Work("copy", 0, 1, OTHER)]).rest_us == 1


def test_it_is_shown_and_written(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = profile()
    assert "moe 3 11.0, moe 4 12.0, all else 2.0" in profile_line(found)
    assert all(fits(console(), layer_table(layer)) for layer in found.means)
    data = json.loads(json.dumps(found.to_dict()))
    assert [layer["layer"] for layer in data["layers"]] == [None, 3, 4]
    assert [part["collective"] for part in data["means"][1]["parts"]] == [0, 0, 1, 0]
