"""Loading and packing stay within their memory, measured as a fresh process's peak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.small_models.models import save_hf, save_hub, tiny_config, tiny_model
from tests.quick_cases import quick_first

PROGRAM = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from dsa_compile.facts.model_spec import ModelSpec
from dsa_compile.weights.canonical import canonical_parameters, compute_dtype
from dsa_compile.weights.checkpoint import Checkpoint
from tests.weights.loading import load_layer
from dsa_compile.weights.pack import PackedWeights, write_packed
from dsa_compile.weights.plan import *

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

torch.set_num_threads(1)
spec = ModelSpec.from_json(json.loads(sys.argv[1]))
directory, recipe, action, out = Path(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5])
layers = range(spec.num_hidden_layers)
checkpoint = Checkpoint.open(directory, spec, layers)
plan = WeightPlan()
for layer in layers:
    for name, info in canonical_parameters(spec, [layer]).items():
        if name.startswith(f"model.layers.{layer}."):
            dtype = str(compute_dtype(name, getattr(torch, recipe)))[6:]
            plan.define(f"{layer}", name, WeightEntry(dtype, info.shape, Load(name)))
            if "kv_b_proj" in name:
                half = Narrow(0, 0, info.shape[0] // 2, Load(name))
                shape = (info.shape[0] // 2, info.shape[1])
                plan.define(f"{layer}", "half", WeightEntry(dtype, shape, half))
regions = [(f"layer-{layer}", f"{layer}", {}) for layer in layers]
source = checkpoint
if action == "packed":
    source = PackedWeights.open(out, write_packed(out, plan, regions, checkpoint))
# The first read and conversion bring in code that stays; it belongs to no weight.
warm = torch.empty(checkpoint.shape("model.norm.weight"), dtype=torch.float64)
checkpoint.read_into("model.norm.weight", warm)
name = "model.layers.0.self_attn.q_a_proj.weight"
checkpoint.read_into(name, torch.empty(checkpoint.shape(name), dtype=torch.bfloat16))
gc.collect()
ctypes.CDLL(None).malloc_trim(0)  # else freed memory would hide new
before = status("VmRSS")
if action == "pack":
    write_packed(out, plan, regions, checkpoint)
    final = 0
else:
    weights = [load_layer(plan, kind, v, source, stem=stem) for stem, kind, v in regions]
    final = sum(plan.nbytes(kind) for kind in plan.kinds())
entries = [entry for kind in plan.kinds() for entry in plan.entries(kind).values()]
print(json.dumps({
    "extra": max(0, status("VmHWM") - before - final),
    "final": sum(plan.nbytes(kind) for kind in plan.kinds()),
    "largest_layer": max(plan.nbytes(kind) for kind in plan.kinds()),
    "largest_weight": max(torch.Size(e.shape).numel() * e.torch_dtype.itemsize for e in entries),
}))
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Five layers of mixtures of experts, 7 M parameters each but for the first."""
    config = tiny_config(
        6,
        first_k_dense_replace=1,
        hidden_size=512,
        intermediate_size=512,
        moe_intermediate_size=256,
        n_routed_experts=16,
    )
    model = tiny_model(config)
    made = {name: tmp_path_factory.mktemp(name) for name in ("hub", "fused", "out")}
    save_hub(model, made["hub"], mtp=False)
    save_hf(model, made["fused"], fused_experts=True)
    return made


def measure(directories, spec, layout, recipe, action):
    directory, out = str(directories[layout]), str(directories["out"])
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(spec.to_json()), directory, recipe, action, out],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("layout", "recipe", "action"),
    quick_first(
        [
            ("hub", "bfloat16", "packed"),
            ("hub", "bfloat16", "load"),
            ("hub", "float32", "load"),
            ("fused", "bfloat16", "load"),
            ("hub", "bfloat16", "pack"),
        ],
        2,
    ),
)
def test_peak_memory(directories, spec_of, layout, recipe, action):
    spec = spec_of(directories[layout])
    for _ in range(3):  # code that the system had paged out and reads again counts, too
        facts = measure(directories, spec, layout, recipe, action)
        print(layout, recipe, action, facts)
        assert facts["final"] > 4 * facts["largest_layer"], "a leak of layers would not show"
        # Half a weight for all that is no weight; holding a second one would exceed it.
        limit = 1.5 * facts["largest_weight"] if action == "pack" else facts["largest_layer"]
        if facts["extra"] <= limit:
            return
    raise AssertionError(facts)
