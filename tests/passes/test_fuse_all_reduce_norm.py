import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.fuse_all_reduce_norm import FuseAllReduceNorm
from dsa_compile.passes.place import Place
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Sketch, region, value, weight

dsa = torch.ops.dsa

TP2 = CompileConfig(target="cpu", recipe="fp8", layout=Layout(tp=2))
WIDTH, EPS = 128, 1e-6
OUTPUTS = ("normed", "q", "scale", "hidden")


def operands(inner: int, dtype: torch.dtype):
    shapes = {"gate": (inner, WIDTH), "up": (inner, WIDTH), "down": (WIDTH, inner)}
    return (
        value("x", "T", WIDTH, dtype=dtype),
        value("hidden", "T", WIDTH, dtype=dtype),
        weight("norm.weight", WIDTH, dtype=dtype),
        *(weight(name, *shape, dtype=dtype) for name, shape in shapes.items()),
    )


def mlp(x, gate, up, down):
    inner = dsa.swiglu.default(dsa.linear.default(x, gate), dsa.linear.default(x, up))
    return dsa.linear.default(inner, down)


def before(dtype: torch.dtype) -> Sketch:
    @region("dense", *operands(32, dtype), outputs=OUTPUTS, path="post_attention_layernorm")
    def separate(x, hidden, norm, *weights):
        parts = dsa.add_rms_norm_quantize.default(mlp(x, *weights), hidden, norm, EPS, True)
        return parts[0], parts[1], parts[2], parts[3]

    return separate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_over_ranks_is_part_of_its_norm(check: PassCheck, dtype: torch.dtype) -> None:
    @region("dense", *operands(16, dtype), outputs=OUTPUTS)
    def after(x, hidden, norm, *weights):
        parts = dsa.all_reduce_add_rms_norm_quantize.default(
            mlp(x, *weights), "tp", 2, hidden, norm, EPS, True
        )
        return parts[0], parts[1], parts[2], parts[3]

    check(FuseAllReduceNorm(), before(dtype), after, prepare=[Place()], config=TP2)


def test_a_sum_that_something_else_reads_stays(check: PassCheck) -> None:
    @region("dense", value("x", "T", WIDTH), weight("norm.weight", WIDTH), outputs=("y", "sum"))
    def shared(x, norm):
        total = dsa.all_reduce.default(x, "tp", 2)
        return dsa.add_rms_norm_quantize.default(total, x, norm, EPS, True)[0], total

    assert "matched 0 of 1" in check.declines(FuseAllReduceNorm(), shared, config=TP2)
