"""Overlapped regions on a Hopper GPU: the same bits as on one stream, eagerly and in graphs."""

import numpy as np
import pytest
import torch

from dsa_compile.artifact import Artifact
from dsa_compile.ir.streams import has_streams
from dsa_compile.lowering.compile_model import compile_model
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.loading.load_runner import load_runner
from tests.trained import trained_model

from .test_padding import step

pytestmark = pytest.mark.gpu(capability=(9, 0))
LENGTHS = (5, 64, 130, 300)
PAGES = 8


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def artifacts(request, tmp_path_factory):
    """The trained model on two streams, and on one."""
    folder = tmp_path_factory.mktemp(request.param)
    for name, disable in (("two", ()), ("one", ("overlap_streams",))):
        compile_model(
            trained_model(), folder / name, target="sm_90a", recipe=request.param, disable=disable
        )
    return folder


def overlapped(path):
    artifact = Artifact.open(path)
    return [r.name for r in artifact.manifest.regions if has_streams(artifact.region(r.name).graph)]


def poison():
    """Fill what the allocator will give out next with NaN."""
    blocks = [torch.full((1 << bits,), torch.nan, device="cuda") for bits in range(8, 22)]
    del blocks


def run(path, graphs, repeats):
    """Prefill, then decode the same step again and again: all logits, and the caches."""
    runner = load_runner(
        path,
        EngineOptions(
            num_gpu_blocks_override=64, max_num_seqs=8, max_model_len=512, enforce_eager=not graphs
        ),
    )
    rng = np.random.default_rng(0)
    found = []
    for row, length in enumerate(LENGTHS):
        tokens = rng.integers(3, 1500, length)
        found.append(runner.forward(step(runner, [tokens], [row * PAGES], [0], [row])).clone())
    rows = range(len(LENGTHS))
    decode = step(runner, [[9 + r] for r in rows], [r * PAGES for r in rows], LENGTHS, rows)
    for _ in range(repeats):
        poison()
        found.append(runner.forward(decode).clone())
    return found + [cache for layer in runner.caches.values() for cache in layer.values()]


@pytest.mark.parametrize("graphs", [False, True])
def test_two_streams_give_the_bits_of_one(artifacts, graphs):
    assert any(name.endswith(".long") for name in overlapped(artifacts / "two"))
    assert not overlapped(artifacts / "one")
    two, one = (run(artifacts / name, graphs, 50) for name in ("two", "one"))
    for ours, wanted in zip(two, one, strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))
