"""The weight plan: shapes, templates, and a JSON form that takes nothing it does not know."""

import json

import pytest

from dsa_compile.errors import ArtifactError
from dsa_compile.weights.plan import (
    Concat,
    Constant,
    Load,
    Narrow,
    Reshape,
    Transpose,
    WeightEntry,
    WeightPlan,
    expr_from_json,
    infer_shape,
    resolve,
)

SHAPES = {"a.w": (6, 4), "b.w": (2, 4), "v": (8,)}
KV_B = Transpose(1, 2, Narrow(1, 1, 2, Reshape((2, 3, 4), Load("{layer}.w"))))


def shape(expr, **variables):
    return infer_shape(expr, {"layer": "a", **variables}, SHAPES.__getitem__)


def plan():
    made = WeightPlan()
    merged = Concat(0, (Load("{layer}.w"), Load("b.w")))
    made.define("moe", "merged", WeightEntry("bfloat16", (8, 4), merged))
    made.define("moe", "uk", WeightEntry("float32", (2, 4, 2), KV_B))
    constant = Constant("float32", (2,), (1.0, 0.1))
    made.define("embed", "inv_freq", WeightEntry("float32", (2,), constant))
    return made


def test_shapes():
    assert shape(Load("{layer}.w")) == (6, 4)
    assert shape(Concat(0, (Load("a.w"), Load("b.w")))) == (8, 4)
    assert shape(KV_B) == (2, 4, 2)
    assert shape(Constant("int64", (1, 2), (3, 4))) == (1, 2)


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (Concat(1, (Load("a.w"), Load("b.w"))), "cannot concatenate"),
        (Concat(2, (Load("a.w"), Load("a.w"))), "cannot concatenate"),
        (Concat(0, (Load("a.w"), Load("v"))), "cannot concatenate"),
        (Narrow(0, 5, 2, Load("a.w")), "cannot take 5+2"),
        (Narrow(2, 0, 1, Load("a.w")), "cannot take"),
        (Reshape((5, 5), Load("a.w")), "cannot reshape"),
        (Transpose(0, 2, Load("a.w")), "cannot transpose"),
        (Constant("float32", (3,), (1.0,)), "1 values"),
    ],
)
def test_shapes_that_do_not_fit(expr, message):
    with pytest.raises(ArtifactError) as error:
        shape(expr)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_resolve():
    assert resolve("{layer}.q.{part}", {"layer": "m.3", "part": "w"}) == "m.3.q.w"
    assert resolve("{layer}", {"layer": "{other}"}) == "{other}", "values are not templates"


@pytest.mark.parametrize(
    "template",
    ["{missing}.w", "{layer.__class__}", "{layer!r}", "{layer:>9}", "{layer[0]}", "{", "}", "{}"],
)
def test_resolve_refuses_all_but_names(template):
    with pytest.raises(ArtifactError, match="weight key"):
        resolve(template, {"layer": "x"})


def test_json_round_trip():
    text = json.dumps(plan().to_json())
    again = WeightPlan.from_json(json.loads(text))
    assert again == plan()
    assert json.dumps(again.to_json()) == text
    assert again.entries("embed")["inv_freq"].expr.values == (1.0, 0.1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (7, "expected an expression"),
        ({"key": "x"}, "unknown operation None"),
        ({"op": "exec", "key": "x"}, "unknown operation 'exec'"),
        ({"op": ["load"]}, "unknown operation"),
        ({"op": "load"}, "lacks ['key']"),
        ({"op": "load", "key": "x", "file": "y"}, "unknown fields ['file']"),
        ({"op": "load", "key": 3}, "expected a key"),
        ({"op": "concat", "dim": 0, "parts": []}, "at least one"),
        ({"op": "concat", "dim": -1, "parts": [{"op": "load", "key": "x"}]}, "non-negative"),
        ({"op": "reshape", "shape": [2, True], "of": {"op": "load", "key": "x"}}, "non-negative"),
        ({"op": "reshape", "shape": 4, "of": {"op": "load", "key": "x"}}, "expected a shape"),
        ({"op": "constant", "dtype": "float32", "shape": [2], "values": [1.0]}, "1 values"),
        ({"op": "constant", "dtype": "float", "shape": [1], "values": [1.0]}, "unknown dtype"),
        ({"op": "constant", "dtype": "float32", "shape": [1], "values": [1e999]}, "finite"),
        ({"op": "constant", "dtype": "float32", "shape": [1], "values": ["1"]}, "finite"),
    ],
)
def test_json_is_strict(data, message):
    with pytest.raises(ArtifactError) as error:
        expr_from_json(data)
    assert message in str(error.value)


def test_json_nesting_is_bounded():
    data = {"op": "load", "key": "x"}
    for _ in range(10_000):
        data = {"op": "reshape", "shape": [1], "of": data}
    with pytest.raises(ArtifactError, match="nested deeper"):
        expr_from_json(data)


@pytest.mark.parametrize(
    "data",
    [
        [],
        {"moe": []},
        {"moe": {"w": 1}},
        {"moe": {"w": {"dtype": "float32", "shape": [1]}}},
        {"moe": {"w": {"dtype": "object", "shape": [1], "expr": {"op": "load", "key": "x"}}}},
    ],
)
def test_plan_json_is_strict(data):
    with pytest.raises(ArtifactError, match="weight plan"):
        WeightPlan.from_json(data)


def test_plan_is_edited_through_define_and_remove():
    made = plan()
    with pytest.raises(AssertionError, match="already defined"):
        made.define("moe", "uk", made.entries("moe")["uk"])
    removed = made.remove("moe", "uk")
    assert removed.expr == KV_B
    assert list(made.entries("moe")) == ["merged"]
    assert made.kinds() == ("moe", "embed")
    assert made.entries("head") == {}
    with pytest.raises(TypeError):
        made.entries("moe")["x"] = removed


def test_plan_validates_against_parameters():
    made = plan()
    made.validate("moe", {"layer": "a"}, SHAPES.__getitem__)
    made.define("moe", "wrong", WeightEntry("float32", (4, 6), Load("{layer}.w")))
    with pytest.raises(ArtifactError, match=r"'wrong' is declared \(4, 6\).*gives \(6, 4\)"):
        made.validate("moe", {"layer": "a"}, SHAPES.__getitem__)


def test_entry_facts():
    entry = WeightEntry("bfloat16", (10, 4), Concat(0, (Load("{layer}.w"), Load("a.w"), KV_B)))
    assert entry.sources({"layer": "a"}) == ("a.w",)
    assert plan().nbytes("moe") == 8 * 4 * 2 + 2 * 4 * 2 * 4
