"""Near-misses of passes."""

from pathlib import Path

from dsa_compile.inspect.near_miss import misses_of
from dsa_compile.inspect.store import Store
from dsa_compile.lowering.compile_model import compile_model


def test_equal_misses_are_told_once(published: Path) -> None:
    store = Store.open(published)
    found = misses_of(store, store.pass_number("fuse_add_norm"))
    (queries,) = (miss for miss in found if miss.path == "self_attn.q_a_proj")
    assert {region for region, _ in queries.places} == {"dense", "moe"}
    assert queries.layers == tuple(range(61))
    assert queries.reason == "calls getitem where aten.add.Tensor was expected"
    assert queries.statement is not None
    assert "ops.aten.split_with_sizes" in queries.statement.code
    assert [miss.depth for miss in found] == sorted((m.depth for m in found), reverse=True)


def test_without_records_there_are_no_lines(tiny: Path, tmp_path: Path) -> None:
    compile_model(tiny / "model", tmp_path / "bare", records=False, weights="none")
    store = Store.open(tmp_path / "bare")
    found = misses_of(store, store.pass_number("recognize_rms_norm"))
    assert found
    assert all(miss.statement is None for miss in found)


def test_nodes_inside_a_match_are_no_misses(published: Path) -> None:
    """The norm of every layer matches; what it is made of is not said to have missed it."""
    store = Store.open(published)
    for name in ("recognize_rms_norm", "recognize_swiglu", "fuse_add_norm"):
        stage = store.stage(name)
        removed = {(site.region, node) for site in stage.sites for node in site.removed}
        made = {(site.region, node) for site in stage.sites for node in site.made}
        for miss in misses_of(store, stage.number):
            assert not set(miss.places) & (removed - made), name
