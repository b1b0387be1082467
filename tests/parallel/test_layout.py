"""Layouts: what they cut, what they refuse, and that one rank leaves no trace."""

import json
from dataclasses import replace

import pytest

from dsa_compile.common.strict_json import parse
from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.frontend.architectures import spec_of
from dsa_compile.frontend.layout_checks import check_layout
from examples.small_models.models import tiny_config

SPEC = replace(
    spec_of(tiny_config(2, first_k_dense_replace=1).to_dict()),
    num_attention_heads=128,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    n_routed_experts=256,
    vocab_size=129280,
    hidden_size=7168,
)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_the_released_sizes_divide(tp: int, experts: bool, recipe: str) -> None:
    check_layout(SPEC, Layout(tp=tp, ep=tp if experts else 1, shard_embedding=True), recipe)


@pytest.mark.parametrize(
    ("changed", "layout", "recipe", "message"),
    [
        ({"num_attention_heads": 12}, Layout(tp=8), "bf16", "tp=8: num_attention_heads=12"),
        ({"n_routed_experts": 12}, Layout(tp=8, ep=8), "bf16", "ep=8: n_routed_experts=12"),
        ({"moe_intermediate_size": 1024}, Layout(tp=16), "fp8", "moe_intermediate_size=1024"),
        ({"moe_intermediate_size": 36}, Layout(tp=8), "bf16", "moe_intermediate_size=36"),
        ({"vocab_size": 100}, Layout(tp=8), "bf16", "tp=8: vocab_size=100"),
        ({"intermediate_size": 1000}, Layout(tp=16), "bf16", "tp=16: intermediate_size=1000"),
        ({"moe_intermediate_size": 36}, Layout(tp=2, dp=4), "bf16", "tp*dp=8: moe_intermediate"),
        ({"n_routed_experts": 12}, Layout(dp=8, ep=8), "bf16", "ep=8: n_routed_experts=12"),
        ({"hidden_size": 20}, Layout(tp=8, shard_embedding=True), "bf16", "hidden_size=20"),
    ],
)
def test_a_size_that_does_not_divide_is_named(changed, layout, recipe, message) -> None:
    with pytest.raises(UserError) as error:
        check_layout(replace(SPEC, **changed), layout, recipe)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_blocks_are_kept_whole_in_fp8_alone() -> None:
    small = replace(SPEC, moe_intermediate_size=1024)
    check_layout(small, Layout(tp=16), "bf16")
    with pytest.raises(UserError, match="in whole blocks of 128, as recipe fp8 keeps"):
        check_layout(small, Layout(tp=16), "fp8")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp must be an integer >= 1; got 0"),
        ({"tp": 4, "ep": 2}, "ep=2 with tp=4"),
        ({"ep": 2}, "ep=2 with tp=1"),
        ({"dp": 0}, "dp must be an integer >= 1; got 0"),
        ({"tp": 2, "dp": 2, "ep": 2}, "ep=2 with tp=2 and dp=2: .* give ep=4 or ep=1"),
        ({"shard_embedding": True}, "needs several ranks"),
        ({"dp": 2, "shard_embedding": True}, "needs several ranks"),
    ],
)
def test_layouts_that_cannot_be(sizes, message) -> None:
    with pytest.raises(UserError, match=message):
        Layout(**sizes)


def test_one_rank_is_not_written_down() -> None:
    assert "layout" not in CompileConfig(target="cpu").to_json()


def test_several_ranks_are_read_back() -> None:
    config = CompileConfig(target="cpu", layout=Layout(tp=4, ep=4))
    data = json.loads(json.dumps(config.to_json()))
    assert parse(CompileConfig, data, "options") == config
    assert config.digest() != CompileConfig(target="cpu").digest()


def test_lanes_draft() -> None:
    layout = Layout(tp=2, dp=2)
    assert CompileConfig(target="cpu", draft="mtp", layout=layout).layout is layout


def test_ranks_of_a_lane_follow_one_another() -> None:
    layout = Layout(tp=2, dp=3, ep=6)
    assert (layout.world, str(layout)) == (6, "tp2, dp3, ep6")
    assert [layout.numbers(rank)["dp"] for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [layout.group("tp", rank) for rank in (0, 3)] == [(0, 1), (2, 3)]
    assert [layout.group("dp", rank) for rank in (0, 3)] == [(0, 2, 4), (1, 3, 5)]


def test_lanes_share_experts_and_nothing_else() -> None:
    dense = replace(SPEC, layer_kinds=("dense",) * len(SPEC.layer_kinds))
    with pytest.raises(UserError, match="dp=2: lanes share routed experts, and the layers"):
        check_layout(dense, Layout(dp=2), "bf16")


def test_experts_that_do_not_divide_can_stay_whole() -> None:
    small = replace(SPEC, moe_intermediate_size=128)
    whole = (
        "give a --tp and a --dp that divides it, or --ep 2 for whole experts, or another --recipe"
    )
    with pytest.raises(UserError, match=whole):
        check_layout(small, Layout(dp=2), "fp8")
    check_layout(small, Layout(dp=2, ep=2), "fp8")


def test_sizes_that_are_not_cut_end_anywhere() -> None:
    """One rank takes blocks that are not whole, and so does each lane."""
    small = replace(SPEC, moe_intermediate_size=64, num_attention_heads=3, v_head_dim=50)
    check_layout(small, Layout(dp=2, ep=2), "fp8")


def test_gated_attention_is_not_cut() -> None:
    gated = replace(SPEC, output_gate=True)
    with pytest.raises(UserError, match=r"tp=2: attention whose result is gated, .*give --dp"):
        check_layout(gated, Layout(tp=2), "fp32")
    check_layout(gated, Layout(dp=2), "fp32")
