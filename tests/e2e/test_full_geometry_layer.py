"""A layer of the released widths in recipes of less precision, beside recipe fp32.

All have the same weights, in FP8 blocks; what differs is the rounding of activations, caches and
products. e4m3 keeps four bits: an activation is off by some 2.6 % of its deviation, and so are the
sums over many of them; what a layer adds passes three such roundings in a row.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from .layer import LAYER, Layer, compiled, cosine

STREAM_COSINE = 0.999
"""Least cosine of the residual stream behind the layer, in any recipe."""
UPDATE_COSINE = {"bf16": 0.9999, "fp8": 0.9975, "fp8-kv-tensor": 0.9975}
"""Least cosine of what the layer adds to it."""
MOVED_COSINE, MOVED = 0.99, 0.25
# As in the released model, eight experts of each token out of four of eight groups.
FEW_EXPERTS = 16

PREFILL_AND_DECODE = [[(5, 5), (1, 1)], [(1, 6), (1, 2)]]
# Beyond and below index_topk, 2,048.
LONG_PREFILL_AND_DECODE = [[(4100, 4100), (300, 300)], [(1, 4101), (1, 301)]]

Steps = list[tuple[torch.Tensor, torch.Tensor]]
Run = Callable[..., Steps]
needs_hopper = pytest.mark.gpu(capability=(9, 0))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(kind, recipe, target, experts, steps)``: the stream into and out of the layer."""

    @functools.cache
    def artifact(kind: str, recipe: str, target: str, experts: int) -> Path:
        folder = tmp_path_factory.mktemp("layer")
        return compiled(folder, kind, recipe, target, n_routed_experts=experts)

    @functools.cache
    def results(kind: str, recipe: str, target: str = "cpu", experts: int = FEW_EXPERTS) -> Steps:
        layer = Layer(artifact(kind, recipe, target, experts), pages=256)
        steps = PREFILL_AND_DECODE if experts == FEW_EXPERTS else LONG_PREFILL_AND_DECODE
        return [layer("long", lengths) for lengths in steps]

    return results


def agree(ours: Steps, theirs: Steps, stream: float, update: float, moved: float = 0.0) -> None:
    """At least these cosines of the stream and of what the layer adds to it, at every step.

    ``moved`` is the share of tokens, at most, left out because another expert was chosen for them:
    of 256 experts with random weights some are always tied up to rounding.
    """
    for (before, after), (reference_before, reference_after) in zip(ours, theirs, strict=True):
        assert torch.equal(before.cpu(), reference_before.cpu())
        added, wanted = after.cpu() - before.cpu(), reference_after.cpu() - before.cpu()
        same = torch.ones(len(added), dtype=torch.bool)
        if moved:
            same = F.cosine_similarity(added, wanted) >= MOVED_COSINE
            assert (~same).double().mean() <= moved
        assert cosine(after.cpu()[same], reference_after.cpu()[same]) >= stream
        assert update <= cosine(added[same], wanted[same]) < 1 - 1e-9


# Both kinds share their attention: what a dense layer adds is three projections, FP8 or not.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recipe"), [("dense", "fp8"), *(("moe", name) for name in UPDATE_COSINE)]
)
def test_a_layer_is_the_fp32_one_up_to_rounding(run: Run, kind: str, recipe: str) -> None:
    agree(run(kind, recipe), run(kind, "fp32"), STREAM_COSINE, UPDATE_COSINE[recipe])


@needs_hopper
@pytest.mark.parametrize("recipe", UPDATE_COSINE)
@pytest.mark.parametrize("kind", LAYER)
def test_kernels_make_the_layer_that_the_references_make(run: Run, kind: str, recipe: str) -> None:
    """Sums run in another order; where that turns a rounding, what follows differs by a step."""
    agree(run(kind, recipe, "sm_90a"), run(kind, recipe), 0.9995, 0.999)


@pytest.mark.gpu(capability=(9, 0), alone=True)
@pytest.mark.parametrize("recipe", UPDATE_COSINE)
@pytest.mark.parametrize("kind", LAYER)
def test_a_whole_layer_with_selection_on_a_gpu(run: Run, kind: str, recipe: str) -> None:
    """All experts, and contexts of which most keys are left out."""
    experts = 256 if torch.cuda.mem_get_info()[0] > 100 << 30 else 64  # in fp32, 45 GB
    ours, theirs = (run(kind, name, "sm_90a", experts) for name in (recipe, "fp32"))
    agree(ours, theirs, STREAM_COSINE, UPDATE_COSINE[recipe] - 3e-4, moved=MOVED)
