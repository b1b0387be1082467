"""Random weights by a plan."""

import pytest
import torch

from dsa_compile.weights.dummy import DummyWeights
from dsa_compile.weights.plan import Constant, Load, WeightEntry, WeightPlan
from tests.weights.loading import load_layer

ENTRIES = {
    "q.weight_e4m3": ("float8_e4m3fn", (256, 384)),
    "q.weight_scale_inv": ("float32", (2, 3)),
    "embed.weight": ("bfloat16", (100, 64)),
    "input_layernorm.weight": ("bfloat16", (64,)),
    "gate.e_score_correction_bias": ("float32", (16,)),
}


@pytest.fixture
def plan() -> WeightPlan:
    plan = WeightPlan()
    for key, (dtype, shape) in ENTRIES.items():
        plan.define("moe", key, WeightEntry(dtype, shape, Load(f"{{layer}}.{key}")))
    plan.define("moe", "inv_freq", WeightEntry("float32", (2,), Constant("float32", (2,), (1, 2))))
    return plan


def made(plan, stem="layer_003", seed=0):
    return load_layer(plan, "moe", {"layer": "model.layers.3"}, DummyWeights(seed), stem=stem)


def test_shapes_and_types_are_the_plans(plan):
    weights = made(plan)
    assert list(weights) == [*ENTRIES, "inv_freq"]
    for key, (dtype, shape) in ENTRIES.items():
        assert (str(weights[key].dtype), tuple(weights[key].shape)) == (f"torch.{dtype}", shape)


def test_a_quantised_matrix_keeps_variance(plan):
    """Every value is finite, and rows have unit length once they are scaled."""
    weights = made(plan)
    q, scale = weights["q.weight_e4m3"].float(), weights["q.weight_scale_inv"]
    assert q.isfinite().all()
    wide = q * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert 0.8 < wide.square().sum(1).mean().sqrt() < 1.2


def test_special_weights(plan):
    weights = made(plan)
    assert weights["inv_freq"].tolist() == [1.0, 2.0]
    assert not weights["gate.e_score_correction_bias"].any()
    assert (weights["input_layernorm.weight"].float() - 1).abs().max() <= 0.25


def test_layers_and_seeds_differ_and_runs_do_not(plan):
    def values(**options):
        return made(plan, **options)["embed.weight"]

    assert torch.equal(values(), values())
    assert not torch.equal(values(), values(stem="layer_004"))
    assert not torch.equal(values(), values(seed=1))
