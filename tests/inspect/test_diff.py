"""The rewrites of a pass, from what it recorded; equal ones folded."""

from pathlib import Path

import pytest

from dsa_compile.inspect.diff import RegionDiff, pass_diff
from dsa_compile.inspect.fold import fold, outliers
from dsa_compile.inspect.store import Stage, Store


@pytest.fixture(scope="module")
def store(published: Path) -> Store:
    return Store.open(published)


def test_every_node_that_comes_or_goes_is_in_one_rewrite(store: Store) -> None:
    for stage in store.stages[1:]:
        for diff in pass_diff(stage):
            removed = [name for hunk in diff.hunks for name in hunk.removed]
            made = [name for hunk in diff.hunks for name in hunk.made]
            assert sorted(removed) == sorted(diff.pairing.removed), stage.name
            assert sorted(made) == sorted(diff.pairing.made), stage.name
            numbers = [number for hunk in diff.hunks for number in hunk.sites]
            assert len(set(numbers)) == len(numbers)


def test_every_numbered_rewrite_is_shown(store: Store) -> None:
    for stage in store.stages[1:]:
        folds = fold(store, pass_diff(stage))
        shown = sorted(n for each in folds for place in each.places for n in place.sites)
        assert shown == [site.number for site in stage.sites if site.region], stage.name
        assert stage.summary is not None
        if all(site.region for site in stage.sites):
            assert sum(each.rewrites for each in folds) == stage.summary.rewrites, stage.name


def test_equal_rewrites_are_told_once(store: Store) -> None:
    (norms,) = fold(store, pass_diff(store.stage("recognize_rms_norm")))
    assert norms.rewrites == 4 * 61 + 1
    assert norms.layers == tuple(range(61))
    assert {place.path for place in norms.places} == {
        "input_layernorm", "post_attention_layernorm", "norm",
        "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm",
    }  # fmt: skip
    assert [line.code for line in norms.made] == [
        "rms_norm = ops.dsa.rms_norm(hidden, input_layernorm_weight, eps=1e-06)"
    ]
    assert len(norms.removed) == 8
    users = [kept.statement.nodes[0] for kept in norms.kept]
    assert users == ["linear", "linear_2", "linear_5", "to_8"]
    assert all(kept.rewired == (("mul_1", "rms_norm"),) for kept in norms.kept)


def test_rewrites_that_hand_on_nodes_are_one(store: Store) -> None:
    stage = store.stage("token_major")
    (moe,) = (diff for diff in pass_diff(stage) if diff.region == "moe")
    joined = [hunk for hunk in moe.hunks if hunk.passing]
    assert joined
    for hunk in joined:
        sites = [site for site in stage.sites if site.number in hunk.sites]
        made = {name for site in sites for name in site.made}
        removed = {name for site in sites for name in site.removed}
        assert set(hunk.passing) <= made & removed


def test_a_pass_without_numbers_is_put_together_by_edges(store: Store) -> None:
    diffs = {diff.region: diff for diff in pass_diff(store.stage("split_short_long"))}
    assert diffs["moe.long"].hunks == ()  # the same under another name
    (gone,) = diffs["moe.short"].hunks
    assert gone.sites == ()
    assert "paged_index_topk_fp8" in gone.removed
    assert gone.made == ("dense_slots",)
    assert [change.after for change in gone.changed] == ["paged_latent_attention_fp8_expand"]


def test_types_that_change_alone_are_no_rewrite(store: Store) -> None:
    diffs = {diff.region: diff for diff in pass_diff(store.stage("flatten_tokens"))}
    head = diffs["head"]
    assert (head.hunks, len(head.retyped)) == ((), 3)


def whole(store: Store, name: str) -> tuple[Stage, list[RegionDiff]]:
    stage = store.stage(name)
    return stage, pass_diff(stage)


def test_no_outlier_where_layers_agree(store: Store) -> None:
    for name in ("recognize_rms_norm", "absorb_mla", "quantize_indexer", "recognize_swiglu"):
        assert outliers(store, *whole(store, name)) == []


def test_layers_left_out_are_outliers(store: Store) -> None:
    stage, diffs = whole(store, "quantize_indexer")
    (found,) = outliers(store, stage, [diff for diff in diffs if diff.region != "dense"])
    assert (found.path, found.layers) == ("self_attn", (0, 1, 2))
    assert found.text == "not rewritten, as it is in layers 3-60"


def test_layers_rewritten_otherwise_are_outliers(store: Store) -> None:
    """Only the experts' router reads the norm itself, beside its quantised rows."""
    (found,) = outliers(store, *whole(store, "fuse_add_norm_quantize"))
    assert found.layers == (0, 1, 2)
    assert found.text == "rewritten otherwise than in layers 3-60"
