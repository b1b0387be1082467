import pytest
import torch
from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter

from dsa_compile.passes.functionalize import Functionalize
from dsa_compile.passes.recognize_router import RecognizeRouter
from dsa_compile.passes.strip_noise import StripNoise
from examples.small_models.models import tiny_axk2_config, tiny_config
from tests.passes.conftest import PassCheck
from tests.passes.sketch import Exported, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

EXPERTS, HIDDEN = 16, 128
OUTPUTS = ("weights", "indices")
CLEAN = (StripNoise(), Functionalize())


class Router(torch.nn.Module):
    """The reference's router, without the logits that only training reads."""

    def __init__(self, **geometry) -> None:
        super().__init__()
        self.gate = DeepseekV32TopkRouter(tiny_config(4, **geometry))

    def forward(self, x):
        return self.gate(x)[1:]


def exported(**geometry) -> Exported:
    return Exported("moe", lambda: Router(**geometry), (value("x", "B", "S", HIDDEN),), OUTPUTS)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (1, 1)])
def test_the_whole_choice_becomes_one_op(
    check: PassCheck, normalize: bool, groups: int, kept: int
) -> None:
    geometry = {"n_group": groups, "topk_group": kept, "norm_topk_prob": normalize}

    @region(
        "moe",
        value("x", "B", "S", HIDDEN),
        weight("gate.weight", EXPERTS, HIDDEN),
        weight("gate.e_score_correction_bias", EXPERTS),
        outputs=OUTPUTS,
    )
    def expected(x, w, bias):
        x = aten.view.default(x, [-1, HIDDEN])
        chosen = dsa.router.default(x, w, bias, groups, kept, 4, normalize, 2.5)
        return chosen[0], chosen[1]

    check(RecognizeRouter(), exported(**geometry), expected, prepare=CLEAN, **geometry)


def test_declines_a_division_that_the_configuration_does_not_name(check: PassCheck) -> None:
    message = check.declines(
        RecognizeRouter(), exported(norm_topk_prob=False), prepare=CLEAN, norm_topk_prob=True
    )
    assert message == (
        "pass recognize_router: matched 0 of 1 sites in 'moe' (2 layers); nearest miss: "
        "gate: node gather: calls aten.gather.default where aten.div.Tensor was expected"
    )


class OtherRouter(torch.nn.Module):
    """A.X-K2's router."""

    def __init__(self, **geometry) -> None:
        super().__init__()
        self.gate = AXK2TopkRouter(tiny_axk2_config(4, **geometry))

    def forward(self, x):
        return self.gate(x)[1:]


@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (None, None)])
def test_dropped_groups_that_score_zero_and_no_groups(check: PassCheck, groups, kept) -> None:
    @region(
        "moe",
        value("x", "B", "S", HIDDEN),
        weight("gate.weight", EXPERTS, HIDDEN),
        weight("gate.e_score_correction_bias", EXPERTS),
        outputs=OUTPUTS,
    )
    def expected(x, w, bias):
        x = aten.view.default(x, [-1, HIDDEN])
        late = (0, None, True) if groups else ()
        chosen = dsa.router.default(x, w, bias, groups or 1, kept or 1, 4, True, 2.5, *late)
        return chosen[0], chosen[1]

    module = lambda: OtherRouter(n_group=groups, topk_group=kept)  # noqa: E731
    source = Exported("moe", module, (value("x", "B", "S", HIDDEN),), OUTPUTS)
    check(RecognizeRouter(), source, expected, prepare=CLEAN)


class SoftmaxRouter(Router):
    """Another score function."""

    def forward(self, x):
        scores = torch.nn.functional.linear(x, self.gate.weight).softmax(-1)
        weights, indices = scores.topk(4)
        return weights * 2.5, indices


def test_declines_another_score_function(check: PassCheck) -> None:
    source = Exported("moe", SoftmaxRouter, (value("x", "B", "S", HIDDEN),), OUTPUTS)
    message = check.declines(RecognizeRouter(), source, prepare=CLEAN)
    assert message.endswith("node getitem: calls getitem where aten.div.Tensor was expected")
