import pytest
import torch

from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.passes.shard_attention import ShardAttention
from tests.passes.conftest import PassCheck
from tests.passes.sketch import region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, NOPE, ROPE, RANK, LOW, WIDTH = 4, 16, 8, 32, 24, 64
TP2 = CompileConfig(layout=Layout(tp=2))


def attention(x, cache, slots, q_b, w_uk, w_uv, o_proj, heads=HEADS):
    q = aten.view.default(dsa.linear.default(x, q_b), [-1, heads, NOPE + ROPE])
    halves = aten.split_with_sizes.default(q, [NOPE, ROPE], -1)
    absorbed = dsa.absorb_query.default(halves[0], w_uk)
    out = dsa.paged_latent_attention.default(absorbed, halves[1], cache, slots, 0.25)
    flat = aten.reshape.default(dsa.expand_output.default(out, w_uv), [-1, heads * NOPE])
    return dsa.linear.default(flat, o_proj)


def operands(heads: int = HEADS):
    return (
        value("x", "T", LOW),
        value("cache", 2, 16, RANK + ROPE),
        value("slots", "T", 3, dtype=torch.int32),
        weight("q_b", heads * (NOPE + ROPE), LOW),
        weight("w_uk", heads, NOPE, RANK),
        weight("w_uv", heads, NOPE, RANK),
        weight("o_proj", WIDTH, heads * NOPE),
    )


GIVEN = {"slots": torch.arange(36, dtype=torch.int32).view(12, 3) % 32}


def test_each_rank_has_its_heads(check: PassCheck) -> None:
    @region("dense", *operands())
    def before(*given):
        return attention(*given)

    @region("dense", *operands(HEADS // 2))
    def after(*given):
        part = attention(*given, heads=HEADS // 2)
        return dsa.all_reduce.default(part, "tp", 2)

    check(ShardAttention(), before, after, inputs=GIVEN, config=TP2)


def test_heads_that_are_used_elsewhere_are_not_cut(check: PassCheck) -> None:
    @region("dense", *operands(), outputs=("logits", "q"))
    def before(x, cache, slots, q_b, w_uk, w_uv, o_proj):
        q = aten.view.default(dsa.linear.default(x, q_b), [-1, HEADS, NOPE + ROPE])
        halves = aten.split_with_sizes.default(q, [NOPE, ROPE], -1)
        absorbed = dsa.absorb_query.default(halves[0], w_uk)
        out = dsa.paged_latent_attention.default(absorbed, halves[1], cache, slots, 0.25)
        flat = aten.reshape.default(dsa.expand_output.default(out, w_uv), [-1, HEADS * NOPE])
        return dsa.linear.default(flat, o_proj), aten.mul.Tensor(halves[1], 2.0)

    message = check.declines(ShardAttention(), before, config=TP2)
    assert "split_with_sizes_default is used by" in message
    assert "too, which is not cut" in message


@pytest.mark.parametrize("tp", [3, 5])
def test_a_pass_runs_where_the_layout_cuts(tp: int) -> None:
    assert not ShardAttention().runs(CompileConfig())
    assert ShardAttention().runs(CompileConfig(layout=Layout(tp=tp)))
