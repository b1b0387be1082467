import torch

from dsa_compile.passes.fuse_norm_quantize_across_layers import FuseNormQuantizeAcrossLayers
from tests.passes.conftest import PassCheck
from tests.passes.sketch import batch, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

WIDTH, EPS = 160, 1e-6
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
PASS = FuseNormQuantizeAcrossLayers()


def hidden(name: str):
    return value(name, "T", WIDTH, dtype=BF16)


HIDDEN, NORMED = hidden("hidden"), hidden("normed")
QUANTIZED = (value("normed_q", "T", WIDTH, dtype=E4M3), value("normed_scale", "T", 2))
NEXT = weight("next_norm.weight", WIDTH, dtype=BF16)
LAYER = weight("mlp.weight", WIDTH, WIDTH, dtype=BF16)
EMBED_INPUTS = (
    batch("input_ids", "T"),
    weight("model.embed_tokens.weight", 8, WIDTH, dtype=BF16),
    NEXT,
)
HEAD = region("head", NORMED, weight("lm_head.weight", 16, WIDTH, dtype=BF16))(
    lambda normed, w: dsa.linear.default(normed, w)
)


@region("embed", *EMBED_INPUTS, outputs=("hidden", "normed"))
def embed(ids, table, norm):
    made = dsa.embedding.default(ids, table)
    return made, dsa.rms_norm.default(made, norm, EPS)


def layer(kind: str, ue8m0: bool = False, times: int = 1):
    @region(kind, HIDDEN, NORMED, LAYER, NEXT, outputs=("hidden", "normed"), path="attention")
    def before(residual, normed, w, norm):
        x = normed
        for _ in range(times):
            pair = dsa.quantize_blocks.default(normed, ue8m0)
            x = branch(x, pair[0], pair[1], w)
        closing = dsa.add_rms_norm.default(x, residual, norm, EPS)
        return closing[1], closing[0]

    return before


def branch(normed, q, scale, w):
    first = aten.mul.Tensor(
        aten.slice.Tensor(aten.to.dtype(q, torch.float32), 1, 0, 1),
        aten.slice.Tensor(scale, 1, 0, 1),
    )
    return dsa.linear.default(aten.add.Tensor(normed, aten.to.dtype(first, BF16)), w)


def handed_on(kind: str):
    outputs = ("hidden", "normed", "normed_q", "normed_scale")

    @region(kind, HIDDEN, NORMED, *QUANTIZED, LAYER, NEXT, outputs=outputs)
    def expected(residual, normed, q, scale, w, norm):
        x = branch(normed, q, scale, w)
        parts = dsa.add_rms_norm_quantize.default(x, residual, norm, EPS, False)
        return parts[3], parts[0], parts[1], parts[2]

    return expected


def test_every_layer_quantises_for_the_next(check: PassCheck) -> None:
    @region("embed", *EMBED_INPUTS, outputs=("hidden", "normed", "normed_q", "normed_scale"))
    def expected_embed(ids, table, norm):
        made = dsa.embedding.default(ids, table)
        parts = dsa.rms_norm_quantize_keep.default(made, norm, EPS, False)
        return made, parts[0], parts[1], parts[2]

    check(
        PASS,
        [embed, layer("dense"), layer("moe"), HEAD],
        [expected_embed, handed_on("dense"), handed_on("moe"), HEAD],
        rewrites={"dense": 1, "moe": 1},
        inputs={"input_ids": torch.tensor([3, 1, 4, 1, 5])},
        relative=0.03,
    )


def test_declines_layers_that_scale_differently(check: PassCheck) -> None:
    message = check.declines(PASS, [embed, layer("dense"), layer("moe", ue8m0=True), HEAD])
    assert message == (
        "pass fuse_norm_quantize_across_layers: matched 0 of 1 sites in 'dense' (2 layers); "
        "nearest miss: node quantize_blocks: layers differ in ue8m0"
    )


def test_declines_a_layer_that_quantises_twice(check: PassCheck) -> None:
    message = check.declines(PASS, [embed, layer("dense", times=2), HEAD])
    assert message.endswith("node dense: quantises the incoming norm 2 times")


def test_declines_a_layer_that_keeps_bf16(check: PassCheck) -> None:
    message = check.declines(PASS, [embed, layer("dense"), layer("moe", times=0), HEAD])
    assert message.endswith("node moe: quantises the incoming norm 0 times")


def test_declines_a_layer_that_hands_no_norm_on(check: PassCheck) -> None:
    @region("dense", HIDDEN, NORMED, LAYER, outputs=("hidden",))
    def odd(residual, normed, w):
        pair = dsa.quantize_blocks.default(normed, False)
        return aten.add.Tensor(branch(normed, pair[0], pair[1], w), residual)

    message = check.declines(PASS, [embed, odd, HEAD])
    assert message.endswith("node dense: hands no norm on")


def test_declines_a_norm_made_by_another_op(check: PassCheck) -> None:
    @region("dense", HIDDEN, NORMED, LAYER, outputs=("hidden", "normed"), path="mlp")
    def odd(residual, normed, w):
        pair = dsa.quantize_blocks.default(normed, False)
        x = branch(normed, pair[0], pair[1], w)
        return aten.add.Tensor(x, residual), x

    message = check.declines(PASS, [embed, odd, HEAD])
    assert message.endswith(
        "mlp: node linear_default: the norm handed on is not made by rms_norm or add_rms_norm"
    )
