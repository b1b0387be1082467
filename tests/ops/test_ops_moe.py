import pytest
import torch


def config(**changes):
    from transformers import DeepseekV32Config

    sizes = {"hidden_size": 24, "moe_intermediate_size": 8, "n_routed_experts": 16}
    sizes |= {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    return DeepseekV32Config(**(sizes | changes))


def naive_router(x, weight, bias, n_group, topk_group, top_k, normalize, scale):
    """fp64, one token and one group at a time."""
    chosen, weights = [], []
    for row in x.double():
        scores = torch.sigmoid(weight.double() @ row)
        biased = scores + bias
        size = len(scores) // n_group
        groups = [list(range(g * size, (g + 1) * size)) for g in range(n_group)]
        value = [sum(sorted(biased[g].tolist())[-2:]) for g in groups]
        best = sorted(range(n_group), key=lambda g: -value[g])[:topk_group]
        allowed = [e for g in best for e in groups[g]]
        picked = sorted(allowed, key=lambda e: -biased[e].item())[:top_k]
        w = scores[picked]
        if normalize:
            w = w / (w.sum() + 1e-20)
        order = sorted(range(top_k), key=lambda i: picked[i])
        chosen.append([picked[i] for i in order])
        weights.append([(w[i] * scale).item() for i in order])
    return torch.tensor(weights).view(-1, top_k), torch.tensor(chosen).view(-1, top_k)


def by_expert(weights, indices):
    indices, order = indices.sort(-1)
    return weights.gather(1, order), indices


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("tokens", "n_group", "topk_group"), [(9, 4, 2), (9, 1, 1), (9, 4, 4), (5, 8, 3), (0, 4, 2)]
)
def test_router_is_the_formula(tokens, n_group, topk_group, normalize):
    x, weight, bias = torch.randn(tokens, 24), torch.randn(16, 24) * 0.3, torch.randn(16) * 0.3
    args = (n_group, topk_group, 4, normalize, 2.5)
    weights, indices = torch.ops.dsa.router(x, weight, bias, *args)
    assert weights.dtype is torch.float32
    assert indices.dtype is torch.int64
    weights, indices = by_expert(weights, indices)
    expected_weights, expected = naive_router(x, weight, bias, *args)
    assert torch.equal(indices, expected)
    torch.testing.assert_close(weights, expected_weights.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [(4, 2), (1, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_router_matches_the_reference_model(groups, normalize, dtype):
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32TopkRouter

    module = DeepseekV32TopkRouter(
        config(n_group=groups[0], topk_group=groups[1], norm_topk_prob=normalize)
    ).to(dtype)
    module.weight.data = (torch.randn(16, 24) * 0.3).to(dtype)
    module.e_score_correction_bias = torch.randn(16) * 0.3
    x = torch.randn(50, 24).to(dtype)
    _, expected_weights, expected = module(x)
    weights, indices = torch.ops.dsa.router(
        x,
        module.weight.data,
        module.e_score_correction_bias,
        *groups,
        4,
        normalize,
        module.routed_scaling_factor,
    )
    got, want = by_expert(weights, indices), by_expert(expected_weights.detach(), expected)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tokens", [0, 5])
def test_router_appends_the_shared_experts(tokens):
    x, weight, bias = torch.randn(tokens, 24), torch.randn(16, 24) * 0.3, torch.randn(16) * 0.3
    args = (x, weight, bias, 4, 2, 4, True, 2.5)
    chosen, got = torch.ops.dsa.router(*args), torch.ops.dsa.router(*args, 2)
    for alone, longer in zip(chosen, got, strict=True):
        assert torch.equal(longer[:, :4], alone)
        assert longer.dtype is alone.dtype
    assert torch.equal(got[0][:, 4:], torch.ones(tokens, 2))
    assert got[1][:, 4:].tolist() == [[16, 17]] * tokens


def test_router_refuses_a_rounded_bias():
    with pytest.raises(ValueError, match="dsa::router takes bias as float32"):
        torch.ops.dsa.router(
            torch.randn(2, 4), torch.randn(4, 4), torch.zeros(4).bfloat16(), 1, 1, 2, True, 1.0
        )


def naive_experts(x, weights, indices, gate_up, down):
    out = torch.zeros(x.shape, dtype=torch.float64)
    inner = down.shape[2]
    for t in range(x.shape[0]):
        for w, e in zip(weights[t].double(), indices[t].tolist(), strict=True):
            hidden = gate_up[e].double() @ x[t].double()
            gate, up = hidden[:inner], hidden[inner:]
            out[t] += w * (down[e].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


def expert_inputs(tokens, experts, top_k, hidden, inner, dtype):
    x = torch.randn(tokens, hidden).to(dtype)
    picks = [torch.randperm(experts)[:top_k] for _ in range(tokens)]
    indices = torch.stack(picks) if picks else torch.empty(0, top_k, dtype=torch.int64)
    weights = torch.rand(tokens, top_k)
    gate_up = (torch.randn(experts, 2 * inner, hidden) * 0.2).to(dtype)
    down = (torch.randn(experts, hidden, inner) * 0.2).to(dtype)
    return x, weights, indices, gate_up, down


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [
        (1, 16, 4, 24, 8),
        (13, 4, 2, 16, 8),
        (13, 5, 3, 33, 7),  # rows that grouped GEMM refuses
        (6, 3, 1, 16, 5),  # down only
        (3, 40, 2, 16, 8),  # most experts idle
        (0, 4, 2, 16, 8),
        (0, 4, 2, 9, 3),
    ],
)
def test_experts_are_the_formula(tokens, experts, top_k, hidden, inner, dtype):
    args = expert_inputs(tokens, experts, top_k, hidden, inner, dtype)
    got = torch.ops.dsa.experts(*args)
    assert got.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), naive_experts(*args), rtol=tolerance, atol=tolerance)


def test_experts_all_on_one_expert():
    x, weights, _, gate_up, down = expert_inputs(7, 4, 1, 16, 8, torch.float32)
    for e in (0, 3):
        indices = torch.full((7, 1), e)
        expected = naive_experts(x, weights, indices, gate_up, down)
        got = torch.ops.dsa.experts(x, weights, indices, gate_up, down)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_match_the_reference_model(dtype):
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Experts

    settings = config()
    settings._experts_implementation = "grouped_mm"
    module = DeepseekV32Experts(settings).to(dtype)
    x, weights, indices, gate_up, down = expert_inputs(31, 16, 4, 24, 8, dtype)
    module.gate_up_proj.data, module.down_proj.data = gate_up, down
    expected = module(x, indices, weights).detach()
    got = torch.ops.dsa.experts(x, weights, indices, gate_up, down)
    # silu's vector tail may differ in the last bit
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_experts_refuse_rounded_weights():
    x, weights, indices, gate_up, down = expert_inputs(3, 4, 2, 16, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="dsa::experts takes weights as float32"):
        torch.ops.dsa.experts(x, weights.bfloat16(), indices, gate_up, down)


def test_router_may_choose_from_dropped_groups_that_score_zero():
    """Bias makes the experts of kept groups negative, as it may in A.X-K2's own router."""
    from transformers.models.axk2.modeling_axk2 import AXK2TopkRouter

    from examples.small_models.models import tiny_axk2_config

    config = tiny_axk2_config(1, n_group=4, topk_group=1, num_experts_per_tok=4)
    gate = AXK2TopkRouter(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gate.weight.normal_(generator=generator)
        gate.e_score_correction_bias.uniform_(-2.0, 0.0, generator=generator)
    x = torch.randn(9, config.hidden_size, generator=generator)
    bias = gate.e_score_correction_bias
    want = gate(x)
    chosen = {}
    for zero in (True, False):
        weights, indices = torch.ops.dsa.router(
            x, gate.weight, bias, 4, 1, 4, True, 2.5, zero_dropped=zero
        )
        ours = torch.zeros(9, 16).scatter_(1, indices, weights)
        chosen[zero] = torch.allclose(ours, torch.zeros(9, 16).scatter_(1, want[2], want[1]))
    assert chosen == {True: True, False: False}


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_a_softmax_router_is_that_of_mistral_large4(groups: tuple[int, int]) -> None:
    module = pytest.importorskip(
        "transformers.models.mistral_large4.modeling_mistral_large4",
        reason="this transformers has no Mistral-Large-4",
    )
    from examples.small_models.models import tiny_mistral_config

    config = tiny_mistral_config(n_group=groups[0], topk_group=groups[1], routed_scaling_factor=2.5)
    gate = module.MistralLarge4TextTopkRouter(config.text_config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        gate.weight.normal_(generator=generator)
    x = torch.randn(9, 128, generator=generator)
    want = gate(x)
    weights, indices = torch.ops.dsa.router(
        x, gate.weight, None, *groups, 4, True, 2.5, zero_dropped=True, softmax=True
    )
    ours = torch.zeros(9, 16).scatter_(1, indices, weights)
    torch.testing.assert_close(ours, torch.zeros(9, 16).scatter_(1, want[2], want[1]))
    sigmoids, _ = torch.ops.dsa.router(x, gate.weight, None, *groups, 4, True, 2.5)
    assert not torch.allclose(sigmoids.sort().values, weights.sort().values)
