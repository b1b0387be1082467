"""Mismatches between graphs, plans, caches and weights are refused, by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from dsa_compile.artifact.interface import check_interface
from dsa_compile.artifact.manifest import Manifest
from dsa_compile.artifact.records import CacheRecord
from dsa_compile.errors import ArtifactError
from dsa_compile.ir.plan import LONG, MODEL, PROMPT, SHORT, Call, Plan
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import TensorInfo
from dsa_compile.weights.plan import Load, WeightEntry, WeightPlan
from tests.artifact.building import LAYERS, SPEC, build, save_model

aten, dsa = torch.ops.aten, torch.ops.dsa


def graph(name: str, outputs: tuple[str, ...], *inputs: tuple[str, Role, TensorInfo]) -> Region:
    made = fx.Graph()
    for key, role, info in inputs:
        node = made.placeholder(key)
        node.meta.update(role=role, key=key, val=info)
    return Region(name, made, outputs)


def f32(*shape: int | str) -> TensorInfo:
    return TensorInfo(torch.float32, shape)


def ids(*shape: str) -> TensorInfo:
    return TensorInfo(torch.int64, shape)


def close(region: Region, target: Any, args: tuple[Any, ...], info: TensorInfo) -> Region:
    nodes = {node.name: node for node in region.graph.nodes}
    args = tuple(nodes.get(arg, arg) if isinstance(arg, str) else arg for arg in args)
    made = region.graph.call_function(target, args)
    made.meta["val"] = info
    region.graph.output((made,))
    return region


class Parts:
    """An artifact of an embedding, two layers and a head, open to damage."""

    def __init__(self, manifest: Manifest) -> None:
        embed = graph(
            "embed", ("hidden",), ("input_ids", Role.BATCH, ids("T")),
            ("table", Role.WEIGHT, f32(512, 8)),
        )  # fmt: skip
        close(embed, aten.embedding.default, ("table", "input_ids"), f32("T", 8))
        self.regions = {"embed": embed}
        for name in ("dense", "moe.long", "moe.short"):
            layer = graph(
                name, ("hidden",), ("hidden", Role.VALUE, f32("T", 8)),
                ("norm", Role.WEIGHT, f32(8)),
                ("latent_cache", Role.CACHE, f32("P", manifest.block_size, 12)),
            )  # fmt: skip
            close(layer, dsa.rms_norm.default, ("hidden", "norm", 1e-6), f32("T", 8))
            self.regions[name] = layer
        head = graph(
            "head", ("logits",), ("hidden", Role.VALUE, f32("T", 8)),
            ("out", Role.WEIGHT, f32(512, 8)),
        )  # fmt: skip
        close(head, dsa.linear.default, ("hidden", "out"), f32("T", 512))
        self.regions["head"] = head
        self.weights = WeightPlan()
        self.weights.define("embed", "table", WeightEntry("float32", (512, 8), Load("e")))
        for kind in ("dense", "moe"):
            entry = WeightEntry("float32", (8,), Load("{layer}.norm"))
            self.weights.define(kind, "norm", entry)
        self.weights.define("head", "out", WeightEntry("float32", (512, 8), Load("o")))
        calls = (
            Call("embed", "embed", {}, None, None),
            *LAYERS,
            Call("head", "head", {}, None, None),
        )
        self.manifest = replace(manifest, plans={MODEL: Plan(calls, ("logits",))})

    def plan(self, **fields: Any) -> None:
        plan = replace(self.manifest.plans[MODEL], **fields)
        self.manifest = replace(self.manifest, plans={MODEL: plan})

    def input(self, region: str, key: str) -> fx.Node:
        [node] = [n for n in self.regions[region].inputs() if n.meta["key"] == key]
        return node

    def check(self, rehearse: bool = False) -> None:
        check_interface(Path("artifact"), self.manifest, self.regions, self.weights, rehearse)


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(build(tmp_path / "artifact", save_model(tmp_path / "model")))


def with_prompts(parts: Parts, *names: str) -> None:
    """Another variant, of these regions."""
    parts.manifest = replace(parts.manifest, variants=(LONG, SHORT, PROMPT))
    parts.regions |= {name: parts.regions["moe.short"].copy(name) for name in names}


def test_a_kind_need_not_have_a_prompt_region(parts: Parts) -> None:
    with_prompts(parts, "moe.prompt")
    parts.check()
    parts.regions["dense.long"] = parts.regions["dense"].copy("dense.long")
    parts.regions["dense.short"] = parts.regions.pop("dense").copy("dense.short")
    parts.check()


def test_the_values_of_a_prompt_region_are_checked(parts: Parts) -> None:
    with_prompts(parts, "moe.prompt")
    parts.input("moe.prompt", "hidden").meta.update(val=f32("T", 9))
    with pytest.raises(ArtifactError, match=r"moe.prompt.json: input hidden of .* is f32\[T, 9\]"):
        parts.check()


Damage = Callable[[Parts], object]


def vocabulary(size: int) -> Damage:
    def damage(parts: Parts) -> None:
        spec = replace(SPEC, vocab_size=size)
        parts.manifest = replace(parts.manifest, model=replace(parts.manifest.model, spec=spec))

    return damage


def without_call(name: str) -> Damage:
    def damage(parts: Parts) -> None:
        calls = parts.manifest.plans[MODEL].calls
        parts.plan(calls=tuple(call for call in calls if call.name != name))

    return damage


def reads_logit_rows(parts: Parts) -> None:
    hidden = parts.input("head", "hidden")
    with hidden.graph.inserting_before(hidden):
        node = hidden.graph.placeholder("logit_rows")
    node.meta.update(role=Role.BATCH, key="logit_rows", val=ids("N"))


def two_types(parts: Parts) -> None:
    caches = {"dense": (CacheRecord("latent_cache", 12, "float32"),)}
    caches["moe"] = (CacheRecord("latent_cache", 12, "bfloat16"),)
    for name in ("moe.long", "moe.short"):
        node = parts.input(name, "latent_cache")
        node.meta["val"] = TensorInfo(torch.bfloat16, node.meta["val"].shape)
    parts.manifest = replace(parts.manifest, caches=caches)
    first, dense, moe, last = parts.manifest.plans[MODEL].calls
    parts.plan(calls=(first, dense, replace(moe, caches=dense.name), last))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "one variant of two": (
        lambda p: p.regions.pop("moe.short"),
        "moe.long do not go with variants",
    ),
    "a prompt region alone": (
        lambda p: (with_prompts(p, "moe.prompt"), p.regions.pop("moe.short")),
        "moe.long, moe.prompt do not go with variants",
    ),
    "a prompt region that the manifest does not know": (
        lambda p: p.regions.update({"moe.prompt": p.regions["moe.short"].copy("moe.prompt")}),
        "do not go with variants",
    ),
    "a variant of its own": (
        lambda p: p.regions.update({"head.tiny": p.regions["head"].copy("head.tiny")}),
        "do not go with variants",
    ),
    "unknown batch input": (
        lambda p: p.input("embed", "input_ids").meta.update(key="secrets"),
        "embed.json: no batch 'secrets' is known for input input_ids",
    ),
    "batch input of another type": (
        lambda p: p.input("embed", "input_ids").meta.update(val=ids("R")),
        r"input input_ids is i64\[R\], batch 'input_ids' is i64\[T\]",
    ),
    "an input without a type": (
        lambda p: p.input("dense", "norm").meta.pop("val"),
        "input norm is of no type, weight 'norm' is",
    ),
    "a value without a type": (
        lambda p: p.input("dense", "hidden").meta.pop("val"),
        "no value 'hidden' is known",
    ),
    "a weight that is not planned": (
        lambda p: p.input("head", "out").meta.update(key="other"),
        "head.json: no weight 'other' is known",
    ),
    "a weight of another shape": (
        lambda p: p.input("head", "out").meta.update(val=f32(513, 8)),
        r"input out is f32\[513, 8\], weight 'out' is f32\[512, 8\]",
    ),
    "an unknown cache": (
        lambda p: p.input("dense", "latent_cache").meta.update(key="x"),
        "no cache 'x' is known",
    ),
    "a cache of another width": (
        lambda p: p.input("dense", "latent_cache").meta.update(val=f32("P", 64, 13)),
        "input latent_cache is",
    ),
    "a size that no step has": (
        lambda p: p.input("dense", "hidden").meta.update(val=f32("Q", 8)),
        "of a size that steps do not have",
    ),
    "a call without its caches": (
        lambda p: p.plan(
            calls=tuple(replace(c, caches=None) for c in p.manifest.plans[MODEL].calls)
        ),
        "layer_000: its kind dense has caches, the call names none",
    ),
    "a cache of two types": (two_types, "cache 'latent_cache' of layer_000 has two types"),
    "a template without its variable": (
        lambda p: p.plan(calls=tuple(replace(c, vars={}) for c in p.manifest.plans[MODEL].calls)),
        "weight 'norm': weight key",
    ),
    "a broken chain": (without_call("embed"), "input hidden of layer_000 is made by no call"),
    "values of two types": (
        lambda p: p.input("head", "hidden").meta.update(val=f32("T", 9)),
        r"input hidden of head is f32\[T, 9\], layer_001 makes f32\[T, 8\]",
    ),
    "no head": (without_call("head"), "no call of model makes its result 'logits'"),
    "no logits": (lambda p: p.plan(results=()), "plans: model makes no logits"),
    "a vocabulary of a billion": (vocabulary(10**9), "head makes logits"),
    "no vocabulary": (vocabulary(0), "head makes logits"),
    "a head that reads the rows to be given and gives all": (
        reads_logit_rows,
        r"head makes logits f32\[T, 512\], not \('N', 512\)",
    ),
    "a result without a type": (
        lambda p: p.regions["dense"].result("hidden").meta.pop("val"),
        "result 'hidden' has no type",
    ),
}


def test_parts_that_fit(parts):
    parts.check()


@pytest.mark.parametrize("name", DAMAGES)
def test_parts_that_do_not_fit(parts, name):
    damage, says = DAMAGES[name]
    damage(parts)
    with pytest.raises(ArtifactError, match=says) as caught:
        parts.check()
    assert str(caught.value).startswith("artifact/")
    assert "recompile" in str(caught.value)


def test_types_that_the_ops_do_not_make(parts):
    """For a GPU, whose kernels take shapes as they come, types are worked out anew."""
    norm = parts.regions["dense"].result("hidden")
    hidden, weight, eps = norm.args
    norm.args = (weight, hidden, eps)
    parts.check()
    with pytest.raises(ArtifactError, match="node rms_norm_default cannot run"):
        parts.check(rehearse=True)


def test_a_list_of_a_billion_tensors(parts):
    region = parts.regions["dense"]
    norm = region.result("hidden")
    with region.graph.inserting_before(norm):
        weight = parts.input("dense", "norm")
        wide = region.graph.call_function(aten.expand.default, (weight, [2**30, 8]))
        region.graph.call_function(aten.unbind.int, (wide,))
    with pytest.raises(ArtifactError, match="node unbind_int makes more than 4096 tensors"):
        parts.check(rehearse=True)
