import pytest
import torch
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Experts

from dsa_compile.passes.functionalize import Functionalize
from dsa_compile.passes.recognize_experts import RecognizeExperts
from dsa_compile.passes.strip_expert_sentinels import StripExpertSentinels
from dsa_compile.passes.strip_noise import StripNoise
from examples.small_models.models import tiny_config
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Exported, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

EXPERTS, INNER, HIDDEN, TOP_K = 16, 64, 128, 4
CLEAN = (StripNoise(), Functionalize(), StripExpertSentinels())


class Experts(torch.nn.Module):
    """The reference's routed experts in grouped-GEMM form."""

    def __init__(self, activation: str, dtype: torch.dtype) -> None:
        super().__init__()
        config = tiny_config(4)
        config._experts_implementation = "grouped_mm"
        config.hidden_act = activation
        self.experts = DeepseekV32Experts(config)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)

    def forward(self, x, indices, weights):
        return self.experts(x, indices, weights)


def inputs(dtype: torch.dtype):
    return (
        value("x", "S", HIDDEN, dtype=dtype),
        value("indices", "S", TOP_K, dtype=torch.int64),
        value("weights", "S", TOP_K),
    )


def exported(activation: str = "silu", dtype: torch.dtype = torch.float32) -> Exported:
    return Exported("moe", lambda: Experts(activation, dtype), inputs(dtype), ("logits",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_gemms_become_one_op(check: PassCheck, dtype: torch.dtype) -> None:
    @region(
        "moe",
        *inputs(dtype),
        weight("experts.gate_up_proj", EXPERTS, 2 * INNER, HIDDEN, dtype=dtype),
        weight("experts.down_proj", EXPERTS, HIDDEN, INNER, dtype=dtype),
    )
    def expected(x, indices, weights, gate_up, down):
        return dsa.experts.default(x, weights, indices, gate_up, down)

    generator = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(12)])
    check(
        RecognizeExperts(),
        exported(dtype=dtype),
        expected,
        prepare=CLEAN,
        inputs={"indices": indices},
    )


def test_declines_another_activation(check: PassCheck) -> None:
    message = check.declines(RecognizeExperts(), exported("relu"), prepare=CLEAN)
    assert message == (
        "pass recognize_experts: matched 0 of 1 sites in 'moe' (2 layers); nearest miss: "
        "experts.act_fn: node relu: calls aten.relu.default where aten.silu.default was expected"
    )


class TwiceExperts(Experts):
    """Two uses of the same experts."""

    def forward(self, x, indices, weights):
        return self.experts(x, indices, weights) + self.experts(x.neg(), indices, weights)


def test_every_site_is_found(check: PassCheck) -> None:
    source = Exported(
        "moe",
        lambda: TwiceExperts("silu", torch.float32),
        inputs(torch.float32),
        ("logits",),
    )

    @region(
        "moe",
        *inputs(torch.float32),
        weight("experts.gate_up_proj", EXPERTS, 2 * INNER, HIDDEN),
        weight("experts.down_proj", EXPERTS, HIDDEN, INNER),
    )
    def expected(x, indices, weights, gate_up, down):
        first = dsa.experts.default(x, weights, indices, gate_up, down)
        minus = aten.neg.default(x)
        second = dsa.experts.default(minus, weights, indices, gate_up, down)
        return aten.add.Tensor(first, second)

    indices = torch.arange(48).view(12, TOP_K) % EXPERTS
    check(
        RecognizeExperts(),
        source,
        expected,
        rewrites=2,
        prepare=CLEAN,
        inputs={"indices": indices},
    )
