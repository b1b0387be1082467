import copy
import json
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from dsa_compile.errors import ArtifactError
from dsa_compile.ir.argument_json import MAX_DEPTH, ArgumentError, decode, encode
from dsa_compile.ir.dims import FakeWorld
from dsa_compile.ir.graph_json import region_from_json, region_to_json
from dsa_compile.ir.kernel_ops import allowed_targets
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.tensor_info import ScalarInfo, TensorInfo

aten, dsa = torch.ops.aten, torch.ops.dsa


def sample() -> Region:
    """A region with every kind of node: two outputs, a write into a cache, a list, keywords."""
    world = FakeWorld()
    graph = fx.Graph()

    def given_input(name: str, role: Role, shape: tuple[int | str, ...], dtype: torch.dtype):
        node = graph.placeholder(name)
        node.meta.update(role=role, key=name, val=world.tensor(shape, dtype))
        return node

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta.update(path="model.layers.3.mlp", origin="sample")
        node.meta["val"] = world.evaluate(target, args, kwargs)
        return node

    hidden = given_input("hidden", Role.VALUE, ("T", 8), torch.float32)
    residual = given_input("residual", Role.VALUE, ("T", 8), torch.float32)
    slots = given_input("slot_mapping", Role.BATCH, ("T",), torch.int64)
    cache = given_input("index_cache", Role.CACHE, ("P", 4, 6), torch.float32)
    weight = given_input("weight", Role.WEIGHT, (8,), torch.float32)
    pair = call(dsa.add_rms_norm.default, hidden, residual, weight, 1e-6)
    normed, total = call(operator.getitem, pair, 0), call(operator.getitem, pair, 1)
    parts = call(aten.split_with_sizes.default, normed, [6, 2], -1)
    keys, rest = call(operator.getitem, parts, 0), call(operator.getitem, parts, 1)
    kept = call(aten.contiguous.default, keys, memory_format=torch.contiguous_format)
    call(dsa.write_index_cache.default, kept, cache, slots)
    wide = call(aten.to.dtype, call(aten.mul.Tensor, rest, 0.1), torch.float64)
    graph.output((wide, total))
    return Region("moe.short", graph, ("rest", "residual"))


def sample_inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    hidden, residual = torch.randn(3, 8), torch.randn(3, 8)
    return [hidden, residual, torch.tensor([5, -1, 0]), torch.zeros(2, 4, 6), torch.rand(8)]


def through_text(region: Region) -> Region:
    return region_from_json(json.loads(json.dumps(region_to_json(region), allow_nan=False)))


def test_a_region_survives_exactly() -> None:
    region = sample()
    loaded = through_text(region)
    assert region_to_json(loaded) == region_to_json(region)
    assert (loaded.name, loaded.outputs) == (region.name, region.outputs)
    for before, after in zip(region.graph.nodes, loaded.graph.nodes, strict=True):
        assert (before.op, before.name, before.target) == (after.op, after.name, after.target)


def test_a_loaded_region_computes_the_same() -> None:
    results = []
    for region in (sample(), through_text(sample())):
        inputs = sample_inputs()
        outputs = fx.GraphModule({}, region.graph)(*inputs)
        results.append((*outputs, inputs[3]))
    assert results[0][2].any()  # the cache was written
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_meta_survives_as_description() -> None:
    loaded = through_text(sample())
    nodes = {node.name: node for node in loaded.graph.nodes}
    assert nodes["hidden"].meta["role"] is Role.VALUE
    assert nodes["hidden"].meta["val"] == TensorInfo(torch.float32, ("T", 8))
    pair = next(node for node in nodes.values() if node.target is dsa.add_rms_norm.default)
    assert pair.meta["val"] == (TensorInfo(torch.float32, ("T", 8)),) * 2
    assert (pair.meta["path"], pair.meta["origin"]) == ("model.layers.3.mlp", "sample")


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63 - 1,
        0.1,
        -0.0,
        1e-300,
        1.0,
        math.inf,
        -math.inf,
        "text",
        [1, [2.0, None]],
        (1, (2,)),
        [(1,), []],
        (),
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.device("cpu"),
        torch.device("cuda:1"),
        torch.contiguous_format,
        torch.strided,
    ],
)
def test_arguments_survive_exactly(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)), {})
    assert repr(back) == repr(value)  # tells 1 from 1.0 from True, 0.0 from -0.0, list from tuple


def test_nan_survives() -> None:
    assert math.isnan(decode(encode(math.nan), {}))


@pytest.mark.parametrize(
    "data",
    [
        {"n": "missing"},
        {"n": ["x"]},
        {"dtype": "load"},
        {"dtype": "float32", "n": "x"},
        {"device": "cpu:٣"},
        {"device": "cpu:" + "9" * 5000},
        {"device": 3},
        {"float": "1.5"},
        {"tuple": 3},
        {"sym": "s0"},
        {"slice": [0, 1, None]},
        {},
        2**63,
        -(10**400),
    ],
)
def test_other_json_is_no_argument(data: object) -> None:
    with pytest.raises(ArgumentError):
        decode(data, {})


def test_nesting_is_bounded() -> None:
    data: Any = 1
    for _ in range(MAX_DEPTH):
        data = [data]
    decode(data, {})
    with pytest.raises(ArgumentError, match="deeper"):
        decode([data], {})


def test_an_exported_graph_is_written_but_not_read() -> None:
    graph = fx.Graph()
    ids = graph.placeholder("ids")
    size = graph.call_function(aten.sym_size.int, (ids, 1))
    size.meta["val"] = ScalarInfo("s70")
    most = graph.call_function(torch.sym_max, (size, 4))
    double = graph.call_function(operator.mul, (most, 2))
    end = graph.call_function(operator.getitem, (ids, slice(None, double)))
    graph.output((end,))
    data = region_to_json(Region("dense", graph, ("hidden",)))
    json.dumps(data, allow_nan=False)
    assert [node["target"] for node in data["nodes"] if "target" in node] == [
        "aten.sym_size.int",
        "torch.sym_max",
        "operator.mul",
        "operator.getitem",
    ]
    with pytest.raises(ArtifactError, match="node ids: role None"):
        region_from_json(data)


def node_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in data["nodes"] if node["name"] == name)


def edit_node(node: str, /, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: node_of(data, node).update(fields)


def edit_region(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(fields)


N = "split_with_sizes_default"
BAD = {
    "unknown op": (edit_node(N, target="aten.bernoulli.p"), "not an op that artifacts may use"),
    "python function": (edit_node(N, target="os.system"), "not an op that"),
    "attribute of an op": (edit_node(N, target="aten.view.default.__class__"), "not an op that"),
    "target no text": (edit_node(N, target=["aten.view.default"]), "target is not a short line"),
    "method": (edit_node(N, op="call_method", target="backward"), "op 'call_method' is not one"),
    "module": (edit_node(N, op="call_module", target="m"), "op 'call_module' is not one"),
    "attribute": (edit_node(N, op="get_attr", target="w"), "op 'get_attr' is not one"),
    "too many arguments": (edit_node(N, args=[{"n": "hidden"}, [8], 0, 0]), "takes 3 positional"),
    "too few arguments": (edit_node(N, args=[{"n": "hidden"}]), "'split_sizes' is missing"),
    "unknown keyword": (edit_node(N, kwargs={"out": {"n": "hidden"}}), "has no argument 'out'"),
    "argument twice": (edit_node(N, kwargs={"self": {"n": "hidden"}}), "'self' is given twice"),
    "keyword as code": (edit_node(N, kwargs={"dim=0) or (0": 1}), "has no argument 'dim=0"),
    "wrong type": (edit_node(N, args=[{"n": "hidden"}, "8"]), "'split_sizes' should be List"),
    "constant for tensor": (edit_node(N, args=[1, [8]]), "'self' should be Tensor"),
    "tuple for tensor": (
        edit_node(N, args=[{"n": "add_rms_norm_default"}, [8]]),
        "should be Tenso",
    ),
    "later node": (edit_node(N, args=[{"n": "getitem_2"}, [8]]), "no earlier node 'getitem_2'"),
    "itself": (edit_node(N, args=[{"n": N}, [8]]), "no earlier node"),
    "unknown node": (edit_node(N, args=[{"n": "nowhere"}, [8]]), "no earlier node 'nowhere'"),
    "duplicate name": (edit_node("getitem", name="hidden"), "node of that name exists"),
    "name with code": (edit_node("hidden", name="x):\n import os#"), "not an identifier"),
    "keyword name": (edit_node("hidden", name="import"), "reserved"),
    "long name": (edit_node("hidden", name="a_" + "9" * 5000), "not an identifier"),
    "giant number": (edit_node(N, args=[{"n": "getitem"}, [10**30]]), "does not fit 64 bits"),
    "entry out of range": (
        edit_node("getitem", args=[{"n": "add_rms_norm_default"}, 2]),
        "no entry",
    ),
    "negative entry": (edit_node("getitem", args=[{"n": "add_rms_norm_default"}, -1]), "negative"),
    "entry of a tensor": (edit_node("getitem", args=[{"n": "hidden"}, 0]), "has no entries"),
    "entry by name": (edit_node("getitem", args=[{"n": "hidden"}, "T"]), "whole number"),
    "args no list": (edit_node(N, args={"n": "hidden"}), "args must be a list"),
    "role": (edit_node("hidden", role="secret"), "role 'secret' is not one of"),
    "role unhashable": (edit_node("hidden", role=[]), "role"),
    "key with line break": (edit_node("hidden", key="a\nb"), "key is not a short line"),
    "path with line break": (edit_node(N, path="a\nb"), "path is not a short line"),
    "keywords with line break": (edit_node(N, keywords="a\nb"), "keywords is not a short line"),
    "value dtype": (edit_node(N, val={"dtype": "load", "shape": []}), "val is not a dtype"),
    "value size": (edit_node(N, val={"dtype": "bool", "shape": [-1]}), "val is not a dtype"),
    "value nested": (edit_node(N, val=[[]]), "val is nested"),
    "unknown field": (edit_node(N, extra=1), "unknown field 'extra'"),
    "output not a tuple": (edit_node("output", args=[[{"n": "hidden"}]]), "one tuple of tensors"),
    "output constant": (edit_node("output", args=[{"tuple": [1, 2]}]), "one tuple of tensors"),
    "output of a pair": (
        edit_node("output", args=[{"tuple": [{"n": N}, {"n": "hidden"}]}]),
        "one tuple of tensors",
    ),
    "outputs too few": (edit_region(outputs=["rest"]), "2 results for 1 output names"),
    "outputs twice": (edit_region(outputs=["rest", "rest"]), "an output is named twice"),
    "outputs no names": (edit_region(outputs=[1, 2]), "outputs must be a list of names"),
    "no output": (lambda data: data["nodes"].pop(), "no output for 2"),
    "two outputs": (lambda data: data["nodes"].append(data["nodes"][-1]), "comes after the output"),
    "node no object": (lambda data: data["nodes"].insert(0, "hidden"), "node #0: is not an object"),
    "nodes no list": (edit_region(nodes={}), "nodes must be a list"),
    "extra field": (edit_region(code="import os"), "expected an object with name"),
    "name": (edit_region(name="a\nb"), "not a short line"),
}


@pytest.mark.parametrize("case", BAD)
def test_edited_graphs_are_refused(case: str) -> None:
    edit, message = BAD[case]
    data = json.loads(json.dumps(region_to_json(sample())))
    edit(data)
    with pytest.raises(ArtifactError, match=message) as caught:
        region_from_json(data)
    assert "\n" not in str(caught.value)


def test_refusals_name_graph_and_node() -> None:
    data = region_to_json(sample())
    node_of(data, N)["target"] = "aten.bernoulli.p"
    with pytest.raises(ArtifactError, match=f"^graph moe.short, node {N}: "):
        region_from_json(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_edit_is_refused_or_harmless(data: st.DataObject) -> None:
    content = copy.deepcopy(SAMPLE_JSON)
    holder: Any = content
    while True:
        places = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        place = data.draw(st.sampled_from(places))
        inside = holder[place]
        if not isinstance(inside, dict | list) or not inside or data.draw(st.booleans()):
            break
        holder = inside
    if data.draw(st.booleans()):
        del holder[place]
    else:
        holder[place] = data.draw(json_values)
    try:
        region = region_from_json(content)
    except ArtifactError:
        return
    allowed = set(allowed_targets().values())
    assert all(node.target in allowed for node in region.graph.nodes if node.op == "call_function")
    fx.GraphModule({}, region.graph)  # the generated Python compiles


SAMPLE_JSON = region_to_json(sample())


def test_allowed_ops_have_no_effects_beyond_cache_writes() -> None:
    harmful = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    for name, target in allowed_targets().items():
        if name == "operator.getitem":
            continue
        assert str(target) == name
        assert not harmful & set(target.tags), name
        written = [a.name for a in target._schema.arguments if a.is_write]
        assert set(written) <= {"cache", "latent_cache", "index_cache"}, name


def test_an_argument_without_json_form_names_its_node() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.mul.Tensor, (x, 1j)),))
    with pytest.raises(TypeError, match=r"region dense, node mul_tensor: no JSON form for 1j"):
        region_to_json(Region("dense", graph, ("y",)))
