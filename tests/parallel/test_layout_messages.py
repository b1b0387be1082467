"""Messages of layers by their sizes, beside those in the graphs of artifacts."""

import json
from pathlib import Path

import pytest

import dsa_compile
from dsa_compile.cli.inspect.command import main
from dsa_compile.facts.layout import Layout
from dsa_compile.frontend.architectures import load_config, spec_of
from dsa_compile.inspect.ranks import exchanges, held
from dsa_compile.inspect.store import Store
from dsa_compile.measure.step.released import CONFIG
from dsa_compile.runtime.pages.kinds import page_bytes
from dsa_compile.weights.plan import WeightPlan
from dsa_compile.weights.sharing import weight_homes
from tests.parallel.conftest import LAYOUTS
from tests.parallel.layout_messages import LayerMessage, messages_of_layout

ROOT = Path(__file__).parents[2]
RELEASED = spec_of(load_config(CONFIG).to_dict())
REDUCE = LayerMessage("all_reduce", "tp", 8, 14_336)


@pytest.mark.parametrize("name", ["one", "tp2", "ep2"])
def test_the_graphs_exchange_what_the_sizes_say(artifact, name: str) -> None:
    store, layout = Store.open(artifact(name)), LAYOUTS[name]
    wanted = messages_of_layout(
        store.manifest.model.spec,
        tp=layout.tp,
        shard_embedding=layout.shard_embedding,
        value_bytes=4,
    )
    found = {each.region: each for each in exchanges(store)}
    for region, messages in (
        ("embed", wanted.embedding), ("dense", wanted.dense), ("moe", wanted.moe),
        ("head", wanted.head),
    ):  # fmt: skip
        got = [LayerMessage(m.op, m.axis, m.ranks, m.row_bytes) for m in found[region].messages]
        assert got == list(messages), region
        assert [m.sent for m in found[region].messages] == [m.sent for m in messages]
    total = sum(each.calls * each.sent for each in found.values())
    assert wanted.sent(store.manifest.model.spec) == pytest.approx(total)


def test_tensor_parallelism_sums_twice_a_layer() -> None:
    found = messages_of_layout(RELEASED, tp=8)
    assert found.dense == found.moe == (REDUCE, REDUCE)
    assert [m.row_bytes for m in found.head] == [129_280 // 8 * 2]
    assert found.sent(RELEASED) == 61 * 2 * 14_336 * 2 * 7 / 8 + 7 * 32_320


def test_lanes_exchange_tokens_of_the_layers_with_experts() -> None:
    found = messages_of_layout(RELEASED, dp=8)
    assert (found.embedding, found.dense, found.head) == ((), (), ())
    assert [(m.op, m.row_bytes) for m in found.moe] == [
        ("all_gather", 14_336 + 32 + 64), ("reduce_scatter", 8 * 14_336),
    ]  # fmt: skip
    assert sum(m.sent for m in found.moe) == 7 * (14_336 + 96 + 14_336)


def test_tokens_travel_in_fp8() -> None:
    found = messages_of_layout(RELEASED, dp=8, quantized=True)
    assert [(m.op, m.row_bytes) for m in found.moe] == [
        ("all_gather", 7_168 + 224 + 32 + 64), ("reduce_scatter", 8 * 14_336),
    ]  # fmt: skip


def test_lanes_of_several_ranks_do_both() -> None:
    found = messages_of_layout(RELEASED, tp=2, dp=4)
    assert [m.axis for m in found.moe] == ["tp", "dp", "dp", "tp"]
    assert [m.axis for m in found.dense] == ["tp", "tp"]


def test_the_page_has_these_figures() -> None:
    page = (ROOT / "docs" / "parallelism.md").read_text()
    for label, sizes in {
        "`--tp 2`": {"tp": 2}, "`--tp 4`": {"tp": 4}, "`--tp 8`": {"tp": 8}, "8 lanes": {"dp": 8},
        "4 lanes of 2": {"tp": 2, "dp": 4}, "8 lanes, FP8": {"dp": 8, "quantized": True},
        "4 lanes of 2, FP8": {"tp": 2, "dp": 4, "quantized": True},
    }.items():  # fmt: skip
        found = messages_of_layout(RELEASED, **sizes)
        sent = sum(message.sent for message in found.moe)
        dense = f"{len(found.dense)} | {sum(m.sent for m in found.dense):,.0f}"
        row = (
            f"| {label} | {dense} | {len(found.moe)} | {sent:,.0f} | {found.sent(RELEASED):,.0f} |"
        )
        assert row in page, row


@pytest.mark.parametrize("name", ["tp2", "ep2"])
def test_a_rank_holds_the_bytes_that_are_listed(artifact, name: str) -> None:
    """What several calls take is loaded once, and counted once."""
    store = Store.open(artifact(name))
    plan = WeightPlan.from_json(store.read_json(store.manifest.weights.plan))
    loaded = {
        home: plan.entries(call.kind)[key].nbytes
        for call in store.manifest.calls
        for key, home in weight_homes(store.manifest.calls, plan)[call.name].items()
    }
    found = held(store)
    assert found.weights == sum(loaded.values())
    assert found.token * store.manifest.block_size == page_bytes(store.manifest)


@pytest.mark.slow
def test_drafts_add_weights_once_and_no_messages_to_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The released model over eight ranks: 61 layers, and the one that drafts."""
    said = []
    for draft in (None, "mtp"):
        out = tmp_path / str(draft)
        dsa_compile.compile(
            ROOT / "examples" / "deepseek_v32", out, weights="none", layout=Layout(tp=8),
            target="sm_90a", recipe="fp8", draft=draft, compiled_kernels=False, records=False,
        )  # fmt: skip
        assert main([str(out), "ranks", "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    without, drafting = said
    assert drafting["messages"] == without["messages"] == 123
    assert next(iter(drafting["drafts"].values()))["messages"] == 3
    # a layer and eh_proj more; embedding and head are the model's
    assert 1.4e9 < drafting["weight_bytes"] - without["weight_bytes"] < 1.8e9
    ((gpu, tokens),) = [(n, t) for n, t in drafting["tokens"].items() if t]
    assert gpu.startswith("H200")
    assert tokens < without["tokens"][gpu]
    taken = tokens * drafting["cache_bytes_per_token"] + drafting["weight_bytes"]
    assert taken < 0.9 * 139.8 * 2**30
