import pytest
import torch

from dsa_compile.errors import UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.passes.quantize_latent_cache import QuantizeLatentCache
from dsa_compile.weights.plan import Constant
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, cache, fragment, region, weight
from tests.passes.test_quantize_latent_cache import (
    BLOCK,
    CACHE,
    EPS,
    GIVEN,
    INPUTS,
    RANK,
    ROPE,
    SCALE,
    TOP_K,
    separate,
)

dsa = torch.ops.dsa


@pytest.mark.parametrize("kv_scale", [1.0, 0.02])
def test_rows_are_written_and_read_under_one_scale(check: PassCheck, kv_scale: float) -> None:
    rows = (
        cache("latent_cache", "P", BLOCK, RANK + ROPE, dtype=torch.uint8),
        weight("self_attn.kv_scale", 1),
    )
    step = (batch("slot_mapping", "T"), batch("rows", "T", TOP_K, dtype=torch.int32))

    @region("dense", *INPUTS, *step, *rows)
    def expected(kv, q, q_pe, cos, sin, w, slots, rows, latent, one):
        dsa.norm_rope_write_latent_cache_fp8_tensor.default(
            kv, w, EPS, cos, sin, True, one, latent, slots
        )
        return dsa.paged_latent_attention_fp8_tensor.default(q, q_pe, latent, rows, SCALE, one)

    before = separate()
    check(
        QuantizeLatentCache(),
        region("dense", *before.inputs, path="self_attn")(before.function),
        expected,
        inputs={**GIVEN, "latent_cache": CACHE},
        after_inputs={"latent_cache": torch.full((3, BLOCK, RANK + ROPE), 255, dtype=torch.uint8)},
        relative=0.05,
        config=CompileConfig(recipe="fp8-kv-tensor", kv_scale=kv_scale),
    )


def test_the_scale_is_that_of_the_options() -> None:
    config = CompileConfig(recipe="fp8-kv-tensor", kv_scale=0.25)
    program = fragment(separate(), config=config)
    QuantizeLatentCache()(program)
    entry = program.weights.entries("dense")["self_attn.kv_scale"]
    assert entry.expr == Constant("float32", (1,), (0.25,))


@pytest.mark.parametrize("kv_scale", [0.0, -1.0, float("nan"), float("inf"), 1e-300, 1e300])
def test_a_scale_that_is_none_is_refused(kv_scale: float) -> None:
    with pytest.raises(UserError, match="kv_scale must be a number in"):
        CompileConfig(recipe="fp8-kv-tensor", kv_scale=kv_scale)


def test_a_scale_for_a_recipe_without_one_is_refused() -> None:
    with pytest.raises(UserError, match="recipe fp8 takes no kv scale; fp8-kv-tensor does"):
        CompileConfig(recipe="fp8", kv_scale=0.5)
