"""Expressions evaluated in place give what torch gives, and hold no more than they say."""

import pytest
import torch

from dsa_compile.errors import ArtifactError
from dsa_compile.weights.materialize import materialize, write_expr
from dsa_compile.weights.plan import (
    Concat,
    Constant,
    Load,
    Narrow,
    Reshape,
    Transpose,
    WeightEntry,
    WeightPlan,
    infer_shape,
)
from examples.small_models.models import dequantised_twin
from tests.weights.loading import load_layer

VARIABLES = {"layer": "model.layers.1", "next_norm": "model.layers.2.input_layernorm"}
ATTENTION = "model.layers.1.self_attn."


class Tensors:
    """A reader over tensors in memory."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.read = 0

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def read_into(self, name, out, window=()):
        wanted = self.tensors[name][window]
        assert out.shape == wanted.shape
        self.read += wanted.numel()
        out.copy_(wanted)


READER = Tensors(a=torch.randn(6, 4), b=torch.randn(2, 4), c=torch.randn(4, 6))


def made(expr, dtype="float32", variables=None):
    entry = WeightEntry(dtype, infer_shape(expr, variables or {}, READER.shape), expr)
    # Poison: an element left unwritten shows.
    out = torch.full(entry.shape, 77, dtype=entry.torch_dtype)
    assert materialize(entry, variables or {}, READER, out) is out
    return out


A, B, C = Load("a"), Load("b"), Load("c")
a, b, c = (READER.tensors[n] for n in "abc")


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (A, a),
        (Concat(0, (A, B, A)), torch.cat([a, b, a])),
        (Concat(1, (A, Transpose(0, 1, C))), torch.cat([a, c.T], 1)),
        (Transpose(0, 1, Concat(0, (A, B))), torch.cat([a, b]).T),
        (Narrow(0, 1, 3, A), a[1:4]),
        (Narrow(1, 1, 2, Reshape((2, 3, 4), A)), a.view(2, 3, 4)[:, 1:3]),
        (Transpose(1, 2, Narrow(1, 1, 2, Reshape((2, 3, 4), A))), a.view(2, 3, 4)[:, 1:].mT),
        (Reshape((12, 2), Concat(0, (A,))), a.reshape(12, 2)),
        # into memory that has no view of the inner shape
        (Transpose(0, 1, Reshape((3, 8), A)), a.reshape(3, 8).T),
        (Concat(1, (Reshape((4, 6), A), C)), torch.cat([a.reshape(4, 6), c], 1)),
        (Constant("float32", (2, 1), (0.1, -3.0)), torch.tensor([[0.1], [-3.0]])),
        (
            Concat(0, (B, Constant("float32", (1, 4), (1, 2, 3, 4)))),
            torch.cat([b, torch.arange(1.0, 5)[None]]),
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values(expr, expected, dtype):
    out = made(expr, dtype)
    assert out.is_contiguous()
    assert torch.equal(out, expected.to(out.dtype))


def test_constant_of_integers():
    assert made(Constant("int64", (3,), (1, 2**40, -1)), "int64").tolist() == [1, 2**40, -1]


def test_unknown_variable():
    with pytest.raises(ArtifactError, match="no variable 'layer'"):
        write_expr(Load("{layer}.w"), {}, READER, torch.empty(1))


def layer_plan(checkpoint, dtype):
    """Weight plan of a compiled MoE layer: merged projections, kv_b in its two halves."""
    heads, nope, v, lora = 8, 16, 16, 512

    def entry(expr, dtype=dtype):
        return WeightEntry(dtype, infer_shape(expr, VARIABLES, checkpoint.shape), expr)

    def attention(name):
        return Load("{layer}.self_attn." + name + ".weight")

    kv_b = Reshape((heads, nope + v, lora), attention("kv_b_proj"))
    plan = WeightPlan()
    names = ("q_a_proj", "indexer.wk", "kv_a_proj_with_mqa")
    plan.define("moe", "a_proj", entry(Concat(0, tuple(attention(n) for n in names))))
    plan.define("moe", "w_uk", entry(Narrow(1, 0, nope, kv_b)))
    plan.define("moe", "w_uv", entry(Transpose(1, 2, Narrow(1, nope, v, kv_b))))
    plan.define("moe", "experts", entry(Load("{layer}.mlp.experts.gate_up_proj")))
    plan.define("moe", "weights_proj", entry(attention("indexer.weights_proj"), "float32"))
    plan.define("moe", "next_norm", entry(Load("{next_norm}.weight")))
    return plan


def expected_layer(state, dtype):
    state = {name: tensor.to(dtype) for name, tensor in state.items()}
    get = lambda name: state[f"{ATTENTION}{name}.weight"]  # noqa: E731
    kv_b = get("kv_b_proj").view(8, 32, 512)
    return {
        "a_proj": torch.cat([get("q_a_proj"), get("indexer.wk"), get("kv_a_proj_with_mqa")]),
        "w_uk": kv_b[:, :16],
        "w_uv": kv_b[:, 16:].mT,
        "experts": state["model.layers.1.mlp.experts.gate_up_proj"],
        "next_norm": state["model.layers.2.input_layernorm.weight"],
    }


@pytest.mark.parametrize("layout", ["hub_dir", "hf_dir", "fused_dir"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_of_a_checkpoint(layout, dtype, model, request, open_checkpoint):
    twin = dequantised_twin(model) if layout == "hub_dir" else model
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    plan = layer_plan(checkpoint, dtype)
    weights = load_layer(plan, "moe", VARIABLES, checkpoint)
    assert list(weights) == list(plan.entries("moe"))
    for name, tensor in expected_layer(twin.state_dict(), getattr(torch, dtype)).items():
        assert torch.equal(weights[name], tensor), name
        assert weights[name].is_contiguous()
    exact = twin.state_dict()[f"{ATTENTION}indexer.weights_proj.weight"]
    assert torch.equal(weights["weights_proj"], exact), "fp32 under every recipe"


def test_kind_without_weights(open_checkpoint, hub_dir):
    assert load_layer(WeightPlan(), "none", {}, open_checkpoint(hub_dir)) == {}
