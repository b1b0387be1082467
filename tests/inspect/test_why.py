"""Histories of nodes."""

from pathlib import Path

import pytest

from dsa_compile.errors import UserError
from dsa_compile.inspect.source import Sources
from dsa_compile.inspect.store import Store
from dsa_compile.inspect.why import Ancestor, History, find_nodes

MODELING = "transformers/models/deepseek_v32/modeling_deepseek_v32.py"


@pytest.fixture(scope="module")
def store(published: Path) -> Store:
    return Store.open(published)


def traced(store: Store, name: str, region: str = "moe.long") -> Ancestor:
    ((graph, node),) = find_nodes(store.final, name, [region])
    return History(store).of(store.stages[-1].number, graph.name, node.was or node.name)


def test_a_chain_of_passes_down_to_lines(store: Store) -> None:
    found = traced(store, "paged_latent_attention_fp8_expand")
    assert [step.name for step in found.steps] == [
        "fuse_attention_expand", "fuse_expand_quantize", "quantize_latent_cache",
        "quantize_projections", "insert_paged_caches", "absorb_mla", "token_major", "token_major",
        "recognize_sparse_attention", "recognize_rope_interleaved", "recognize_rope_interleaved",
    ]  # fmt: skip
    producer = store.manifest.producer
    sources = Sources({"transformers": producer.transformers})
    (attention,) = (n for n in found.exported if "scaled_dot_product" in n.target)
    line = sources.line(attention.source)
    assert line is not None
    assert line.startswith("attn_output, attn_weights = attention_interface(")
    # not the projections in front of it: these are nodes of their own
    assert not any(node.target == "aten.linear.default" for node in found.exported)


def test_every_call_of_the_finished_graphs_has_an_answer(store: Store) -> None:
    history = History(store)
    last = store.stages[-1].number
    for graph in store.final.values():
        for node in graph.calls:
            found = history.of(last, graph.name, node.was or node.name)
            assert found.node.target == node.target
            origin = "export" if found.made_by is None else found.made_by.name
            assert node.origin == origin, f"{graph.name}: {node.name}"


def test_three_projections_became_one(store: Store) -> None:
    found = traced(store, "linear_fp8")
    targets = [(node.target, node.path) for node in found.exported]
    assert sorted(targets) == sorted(
        ("aten.linear.default", f"self_attn.{name}")
        for name in ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk")
    )


def test_a_norm_that_moved_to_the_end_of_the_layer_before(tiny: Path) -> None:
    """Norm that was an input norm; the pass works on all regions at once and numbers no rewrite."""
    found = traced(Store.open(tiny / "artifact"), "next_norm")
    names = [step.name for step in found.steps]
    assert names == ["fuse_add_norm_across_layers", "recognize_rms_norm"]
    assert found.steps[0].sites == ()
    assert {node.path for node in found.exported} == {
        "",
        "input_layernorm",
    }  # the sum has no module


def test_an_event_was_introduced(store: Store) -> None:
    found = traced(store, "record_event")
    assert found.made_by is not None
    assert (found.made_by.name, found.sources, found.exported) == ("overlap_streams", (), ())


def test_names_taken_again_are_other_nodes(store: Store) -> None:
    """``linear`` was exported, recognised, merged: one name, four nodes."""
    history = History(store)
    number = store.stage("merge_projections").number
    merged = history.of(number, "moe", "linear")
    assert merged.made_by is not None
    assert merged.made_by.name == "merge_projections"
    exported = history.of(0, "moe", "linear")
    assert (exported.made_by, exported.node.path) == (None, "self_attn.q_a_proj")


def test_later_passes_that_gave_other_inputs(store: Store) -> None:
    history = History(store)
    for after, region, name, names in (
        ("quantize_indexer", "moe", "paged_latent_attention_fp8", ["quantize_indexer"]),
        (
            "overlap_streams",
            "moe.short",
            "paged_latent_attention_fp8_expand",
            ["split_short_long"],
        ),
    ):
        stage = store.stage(after).number
        found = history.of(stage, region, name)
        touched = history.touched(found, stage, region, name)
        assert [step.name for step in touched] == names


def test_nodes_are_found_by_either_name(store: Store) -> None:
    regions = list(store.final)
    ((graph, node),) = find_nodes(store.final, "moe.long:indices", regions)
    assert (graph.name, node.name) == ("moe.long", "indices")
    by_old = find_nodes(store.final, node.was, regions)
    assert (graph, node) in by_old
    with pytest.raises(UserError, match="unknown node 'lineer_fp8'; did you mean 'linear_fp8'"):
        find_nodes(store.final, "lineer_fp8", regions)
    with pytest.raises(UserError, match=r"unknown region 'moe\.lon'; did you mean 'moe.long'"):
        find_nodes(store.final, "moe.lon:gate", regions)


def test_lines_come_from_the_version_compiled_with() -> None:
    installed = Sources({"transformers": __import__("transformers").__version__})
    assert installed.line(f"{MODELING}:1") is not None
    assert Sources({"transformers": "4.0.0"}).line(f"{MODELING}:1") is None
    assert installed.line(f"{MODELING}:999999") is None
    assert installed.line("transformers/../secret.py:1") is None
    assert installed.line("unheard_of/x.py:1") is None
    assert installed.line("") is None


def test_only_python_files_inside_the_package_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("password\n")
    package = tmp_path / "somewhere" / "showable"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "inner/code.py", "inner/data.txt"):
        (package / name).write_text("shown\n")
    (package / "file.py").symlink_to(secret)
    (package / "folder").symlink_to(tmp_path)
    (package / "inner" / "link.py").symlink_to(package / "inner" / "code.py")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr("dsa_compile.inspect.source._installed", lambda package: "1")
    sources = Sources({"showable": "1"})
    shown = ("__init__.py", "inner/code.py", "inner/link.py")
    assert [sources.line(f"showable/{path}:1") for path in shown] == ["shown"] * 3
    hidden = (
        str(secret), f"/{secret}", "../../secret.py", "inner/../../../secret.py", "file.py",
        "folder/secret.py", "inner/data.txt", "inner", "", ".", "inner//code.py", "a\0b.py",
    )  # fmt: skip
    for path in hidden:
        assert sources.line(f"showable/{path}:1") is None, path
