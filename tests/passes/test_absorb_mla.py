import torch

from dsa_compile.passes.absorb_mla import W_UK, W_UV, AbsorbMla
from tests.passes.conftest import PassCheck
from tests.passes.sketch import fragment, region, value, weight

aten, dsa = torch.ops.aten, torch.ops.dsa

HEADS, NOPE, ROPE, VALUE, RANK, TOP_K = 4, 6, 2, 5, 8, 3
KEY = "self_attn.kv_b_proj.weight"
INPUTS = (
    value("q_nope", "B", "S", HEADS, NOPE),
    value("q_pe", "B", "S", HEADS, ROPE),
    value("ckv", "B", "S", RANK),
    value("k_pe", "B", "S", 1, ROPE),
    value("indices", "B", "S", TOP_K, dtype=torch.int32),
)
INDICES = torch.stack([torch.tensor([t, t // 2 - 1, -1]) for t in range(12)]).int().clamp(min=-1)


def expansion(ckv, kv_b):
    """Keys and values of all heads, from the latent."""
    batch, length = aten.sym_size.int(ckv, 0), aten.sym_size.int(ckv, 1)
    latent = aten.view.default(ckv, [batch, 1, length, RANK])
    heads = aten.view.default(dsa.linear.default(latent, kv_b), [batch, length, -1, NOPE + VALUE])
    return aten.split_with_sizes.default(heads, [NOPE, VALUE], -1)


def attend(q_nope, q_pe, key, k_pe, values, indices):
    shared = aten.expand.default(k_pe, [-1, -1, HEADS, -1])
    query = aten.cat.default([q_nope, q_pe], -1)
    keys = aten.cat.default([key, shared], -1)
    return dsa.sparse_attention.default(query, keys, values, indices, 0.3)


@region("dense", *INPUTS, weight(KEY, HEADS * (NOPE + VALUE), RANK))
def expanded(q_nope, q_pe, ckv, k_pe, indices, kv_b):
    pieces = expansion(ckv, kv_b)
    return attend(q_nope, q_pe, pieces[0], k_pe, pieces[1], indices)


def test_attention_moves_to_the_latent(check: PassCheck) -> None:
    @region("dense", *INPUTS, weight(W_UK, HEADS, NOPE, RANK), weight(W_UV, HEADS, VALUE, RANK))
    def expected(q_nope, q_pe, ckv, k_pe, indices, w_uk, w_uv):
        query = dsa.absorb_query.default(q_nope, w_uk)
        latent = dsa.latent_attention.default(
            query, q_pe, ckv, aten.squeeze.dim(k_pe, 2), indices, 0.3
        )
        return dsa.expand_output.default(latent, w_uv)

    check(AbsorbMla(), expanded, expected, inputs={"indices": INDICES.expand(2, 12, 3)})


def test_the_plan_cuts_the_projection_by_head() -> None:
    program = fragment(expanded)
    AbsorbMla()(program)
    entries = program.weights.entries("dense")
    assert KEY not in entries
    variables = program.layers[1].vars
    assert {key: entries[key].sources(variables) for key in (W_UK, W_UV)} == dict.fromkeys(
        (W_UK, W_UV), ("model.layers.1." + KEY,)
    )


def test_declines_values_from_elsewhere(check: PassCheck) -> None:
    extra = value("v", "B", "S", HEADS, VALUE)

    @region("dense", *INPUTS, extra, weight(KEY, HEADS * (NOPE + VALUE), RANK), path="self_attn")
    def before(q_nope, q_pe, ckv, k_pe, indices, v, kv_b):
        pieces = expansion(ckv, kv_b)
        return attend(q_nope, q_pe, pieces[0], k_pe, v, indices)

    assert check.declines(AbsorbMla(), before) == (
        "pass absorb_mla: matched 0 of 1 sites in 'dense' (2 layers); nearest miss: "
        "self_attn: node v: found input v where getitem was expected"
    )


def test_declines_keys_and_values_of_two_projections(check: PassCheck) -> None:
    two = [weight(key, HEADS * (NOPE + VALUE), RANK) for key in (KEY, "other.weight")]

    @region("dense", *INPUTS, *two, path="self_attn")
    def before(q_nope, q_pe, ckv, k_pe, indices, kv_b, other):
        key, values = expansion(ckv, kv_b)[0], expansion(ckv, other)[1]
        return attend(q_nope, q_pe, key, k_pe, values, indices)

    assert "again" in check.declines(AbsorbMla(), before)


def test_declines_keys_that_are_read_elsewhere(check: PassCheck) -> None:
    @region(
        "dense",
        *INPUTS,
        weight(KEY, HEADS * (NOPE + VALUE), RANK),
        outputs=("o", "k"),
        path="self_attn",
    )
    def before(q_nope, q_pe, ckv, k_pe, indices, kv_b):
        pieces = expansion(ckv, kv_b)
        key = pieces[0]
        return attend(q_nope, q_pe, key, k_pe, pieces[1], indices), aten.neg.default(key)

    message = check.declines(AbsorbMla(), before)
    assert message.endswith("node getitem: extra user neg_default outside the match")
