"""Two artifacts side by side."""

from pathlib import Path

import pytest
from torch import fx

from dsa_compile.inspect.compare import Difference, compare
from dsa_compile.inspect.store import Store
from dsa_compile.ir.edit import Editor
from dsa_compile.ir.plan import VARIANTS
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.passes import fuse_add_norm


@pytest.fixture(scope="module")
def unsplit(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without two passes."""
    out = tmp_path_factory.mktemp("unsplit") / "artifact"
    disable = ("split_short_long", "pack_swiglu", "merge_shared_expert")
    compile_model(tiny / "model", out, recipe="fp32", weights="none", disable=disable)
    return out


def test_an_artifact_is_the_same_as_itself(tiny: Path) -> None:
    store = Store.open(tiny / "artifact")
    found = compare(store, store)
    assert found.same
    assert (found.facts, found.rewrites, found.parting) == ((), (), None)
    assert len(found.regions) == 11


def test_compiled_twice_is_the_same(tiny: Path, tmp_path: Path) -> None:
    compile_model(tiny / "model", tmp_path / "again", recipe="fp32")
    assert compare(Store.open(tiny / "artifact"), Store.open(tmp_path / "again")).same


def test_passes_left_out(tiny: Path, unsplit: Path) -> None:
    found = compare(Store.open(tiny / "artifact"), Store.open(unsplit))
    facts = {(fact.what, fact.name): fact for fact in found.facts}
    assert facts["option", "disable"].first == "none"
    assert facts["option", "weights"].second == "none"
    for name in ("pack_swiglu", "split_short_long", "merge_shared_expert"):
        assert facts["pass", name].second is None
    assert ("versions", "torch") not in facts
    merged = facts["weight", "moe: mlp.experts.gate_up_proj_and_shared"]
    assert (merged.first is None, merged.second) == (False, None)
    # the region that is not split is compared with both variants of the other side
    pairs = {(d.pairing.before.name, d.pairing.after.name) for d in found.regions}  # type: ignore[union-attr]
    assert {("moe.long", "moe"), ("moe.short", "moe"), ("head", "head")} <= pairs
    made = [line.code for fold in found.rewrites for line in fold.made]
    assert any("ops.dsa.swiglu(" in line for line in made)
    # the first pass left out is seen after the one behind it
    assert found.parting is not None
    assert (found.parting.name, found.parting.regions) == ("fuse_rope_absorb", ("dense", "moe"))
    # what both have in common is not told
    assert not any("absorb_rope_query" in line for line in made)


@pytest.mark.slow
def test_another_recipe_and_fewer_layers(tiny: Path, tmp_path: Path) -> None:
    compile_model(tiny / "model", tmp_path / "other", recipe="bf16", weights="none", layers=(1, 1))
    found = compare(Store.open(tiny / "artifact"), Store.open(tmp_path / "other"))
    assert Difference("layer", "", "dense", None, (0,)) in found.facts
    gone = [diff for diff in found.regions if diff.pairing.after is None]
    assert {diff.region for diff in gone} == {f"dense.{variant}" for variant in VARIANTS}
    assert any(diff.retyped for diff in found.regions)
    caches = {f.name: (f.first, f.second) for f in found.facts if f.what == "cache"}
    assert caches["moe.index_cache"] == ("32 × float32", "32 × bfloat16")


def test_a_pass_that_does_something_else(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two results of an op taken the wrong way round: nothing fails, and where is told."""
    right = fuse_add_norm.fuse

    def swapped(edit: Editor, total: fx.Node, norm: fx.Node) -> None:
        right(edit, total, norm)
        pair = next(n for n in reversed(edit.graph.nodes) if n.name.startswith("add_rms_norm"))
        for entry in list(pair.users):
            entry.args = (pair, 1 - entry.args[1])  # type: ignore[operator]

    monkeypatch.setattr(fuse_add_norm, "fuse", swapped)
    compile_model(tiny / "model", tmp_path / "bad", recipe="fp32")
    found = compare(Store.open(tiny / "artifact"), Store.open(tmp_path / "bad"))
    assert found.facts == ()
    assert found.parting is not None
    assert (found.parting.name, found.parting.regions) == ("fuse_add_norm", ("dense", "moe"))
    kept = [each for fold in found.rewrites for each in fold.kept]
    assert not any(fold.removed or fold.made for fold in found.rewrites)
    assert {each.statement.nodes[0] for each in kept} >= {"gate", "experts", "gate_up_proj"}


def test_a_program_without_prompt_regions(tiny: Path, tmp_path: Path) -> None:
    disable = ("split_prompts+",)
    compile_model(
        tiny / "model", tmp_path / "other", recipe="fp32", weights="none", disable=disable
    )
    found = compare(Store.open(tiny / "artifact"), Store.open(tmp_path / "other"))
    pairs = {(d.pairing.before.name, d.pairing.after.name) for d in found.regions}  # type: ignore[union-attr]
    assert {("moe.prompt", "moe.short"), ("moe.long_prompt", "moe.long")} <= pairs
    assert {("moe.short", "moe.short"), ("moe.long", "moe.long")} <= pairs
    made = [line.code for fold in found.rewrites for line in fold.made]
    assert any("ops.dsa.paged_latent_attention(" in line for line in made)
