"""Weights in FP8 blocks: as stored, or quantised from whatever is stored."""

import pytest
import torch

from dsa_compile.errors import ArtifactError, CheckpointError
from dsa_compile.weights import stored
from dsa_compile.weights.block_fp8 import BLOCK, E4M3, quantize_rows, scale_shape
from dsa_compile.weights.materialize import materialize
from dsa_compile.weights.plan import (
    Concat,
    Load,
    Narrow,
    QuantizedScales,
    QuantizedValues,
    Transpose,
    WeightEntry,
    expr_from_json,
    expr_to_json,
    infer_shape,
)
from examples.small_models import models

PLAIN = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # 576 rows: ends inside a block
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
DOWN = "model.layers.1.mlp.experts.down_proj"
CASES = [(PLAIN, 1), (GATE_UP, 2), (DOWN, 1)]


def quantized(checkpoint, name, stacked):
    shape = checkpoint.shape(name)
    values = torch.full(shape, 7.0).to(E4M3)
    scales = torch.full(scale_shape(shape, stacked), float("nan"))
    checkpoint.read_quantized(name, stacked, values, scales)
    return values, scales


def dequantize(values, scales, stacked):
    parts = zip(values.chunk(stacked, -2), scales.chunk(stacked, -2), strict=True)
    wide = [
        v.float()
        * s.repeat_interleave(BLOCK, -1)[..., : v.shape[-1]].repeat_interleave(BLOCK, -2)[
            ..., : v.shape[-2], :
        ]
        for v, s in parts
    ]
    return torch.cat(wide, -2)


@pytest.mark.parametrize(("name", "stacked"), CASES)
@pytest.mark.parametrize("slab", [1, 8 << 20])
def test_stored_blocks_are_taken_as_they_are(
    name, stacked, slab, hub_dir, open_checkpoint, monkeypatch
):
    monkeypatch.setattr(stored, "_SLAB", slab)
    checkpoint = open_checkpoint(hub_dir)
    wide = torch.empty(checkpoint.shape(name))
    checkpoint.read_into(name, wide)
    assert torch.equal(dequantize(*quantized(checkpoint, name, stacked), stacked), wide)


@pytest.mark.parametrize(("name", "stacked"), CASES)
@pytest.mark.parametrize("layout", ["hf_dir", "fused_dir"])
@pytest.mark.parametrize("slab", [1, 8 << 20])
def test_others_are_quantized(name, stacked, layout, slab, request, open_checkpoint, monkeypatch):
    monkeypatch.setattr(stored, "_SLAB", slab)
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    wide = torch.empty(checkpoint.shape(name))
    checkpoint.read_into(name, wide)
    values, scales = quantized(checkpoint, name, stacked)
    error = (dequantize(values, scales, stacked) - wide).abs()
    # half a step: 3 bits of mantissa, and the subnormals' spacing under the block's scale
    assert (error <= wide.abs() * 2**-4 + scales.max() * 2**-9).all()
    largest = dequantize(values, scales, stacked).abs().amax()
    torch.testing.assert_close(largest, wide.abs().amax(), rtol=1e-6, atol=0)


def test_values_and_scales_can_be_read_apart(hf_dir, open_checkpoint):
    checkpoint = open_checkpoint(hf_dir)
    values, scales = quantized(checkpoint, GATE_UP, 2)
    only_values, only_scales = torch.empty_like(values), torch.empty_like(scales)
    checkpoint.read_quantized(GATE_UP, 2, only_values, None)
    checkpoint.read_quantized(GATE_UP, 2, None, only_scales)
    assert torch.equal(only_values.float(), values.float())
    assert torch.equal(only_scales, scales)


@pytest.mark.parametrize(("name", "stacked"), CASES)
@pytest.mark.parametrize("layout", ["hub_dir", "hf_dir", "fused_dir"])
@pytest.mark.parametrize("slab", [1, 8 << 20])
def test_windows_of_what_is_quantized(
    name, stacked, layout, slab, request, open_checkpoint, monkeypatch
):
    monkeypatch.setattr(stored, "_SLAB", slab)
    checkpoint = open_checkpoint(request.getfixturevalue(layout))
    for whole in quantized(checkpoint, name, stacked):
        for dim, size in enumerate(whole.shape):
            for start, stop in ((0, 1), (size // 2, size), (size // 3, size - size // 3)):
                shown = [slice(0, each) for each in whole.shape]
                shown[dim] = slice(start, max(start + 1, stop))
                window = tuple(shown)
                out = torch.zeros_like(whole[window].contiguous())
                pair = (None, out) if whole.dtype is torch.float32 else (out, None)
                checkpoint.read_quantized(name, stacked, *pair, window)
                assert torch.equal(out.float(), whole[window].float()), window


def test_zeros_have_a_scale():
    values, scale = quantize_rows(torch.zeros(3, 200))
    assert torch.equal(scale, torch.ones(1, 2))
    assert torch.equal(values.float(), torch.zeros(3, 200))


def test_entries_of_a_plan(hub_dir, open_checkpoint):
    checkpoint = open_checkpoint(hub_dir)
    variables = {"layer": "model.layers.0"}
    key = "{layer}.self_attn.kv_a_proj_with_mqa.weight"
    both = Concat(0, (QuantizedScales(Load(key)), QuantizedScales(Load(key))))
    shape = infer_shape(both, variables, checkpoint.shape)
    assert shape == (10, 2)
    scales = materialize(WeightEntry("float32", shape, both), variables, checkpoint)
    values, once = quantized(checkpoint, PLAIN, 1)
    assert torch.equal(scales, torch.cat((once, once)))
    entry = WeightEntry("float8_e4m3fn", (576, 200), QuantizedValues(Load(key)))
    assert torch.equal(materialize(entry, variables, checkpoint).float(), values.float())
    for expr in (both, entry.expr):
        assert expr_from_json(expr_to_json(expr)) == expr


def test_what_begins_inside_a_block_is_quantized_as_a_whole(hub_dir, open_checkpoint):
    checkpoint = open_checkpoint(hub_dir)
    pair = Concat(0, (Load(PLAIN), Load(PLAIN)))
    wide = materialize(WeightEntry("float32", (1152, 200), pair), {}, checkpoint)
    values = WeightEntry("float8_e4m3fn", (1152, 200), QuantizedValues(pair))
    scales = WeightEntry("float32", (9, 2), QuantizedScales(pair))
    expected = quantize_rows(wide.clone())
    assert torch.equal(materialize(values, {}, checkpoint).float(), expected[0].float())
    assert torch.equal(materialize(scales, {}, checkpoint), expected[1])


@pytest.mark.parametrize(("shape", "stacked"), [((5,), 1), ((7, 4), 2), ((4, 4), 0)])
def test_what_is_no_stack_of_matrices_is_refused(shape, stacked):
    with pytest.raises(ArtifactError, match="cannot quantise"):
        infer_shape(QuantizedValues(Load("w"), stacked), {}, lambda name: shape)


@pytest.mark.parametrize("make", [QuantizedValues, QuantizedScales])
@pytest.mark.parametrize(
    "of",
    [Narrow(0, 0, 2, Load("w")), Transpose(0, 1, Load("w")), Concat(1, (Load("w"), Load("w")))],
)
def test_what_is_made_from_parts_of_parameters_is_not_quantized_silently(make, of):
    """Blocks of such a weight would not be those of the checkpoint."""
    with pytest.raises(ArtifactError, match=r"parts of parameters \(reading w"):
        infer_shape(make(of), {}, lambda name: (4, 4))


def test_blocks_of_another_size(model, tmp_path, open_checkpoint, monkeypatch):
    """Dequantised as any; not taken as blocks, which is known before anything is read."""
    monkeypatch.setattr(models, "FP8_BLOCK", (64, 96))
    models.save_hub(model, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    wide = torch.empty(checkpoint.shape(PLAIN))
    checkpoint.read_into(PLAIN, wide)
    want = models.dequantise(*models.quantise(model.get_parameter(PLAIN).detach()))
    assert torch.equal(wide, want)
    refused = r"blocks of \(64, 96\), recipe fp8 takes 128x128"
    for name, stacked in CASES:
        with pytest.raises(CheckpointError, match=refused):
            checkpoint.check_blocks(name)
        with pytest.raises(CheckpointError, match=refused):
            quantized(checkpoint, name, stacked)
    checkpoint.check_blocks("lm_head.weight")
