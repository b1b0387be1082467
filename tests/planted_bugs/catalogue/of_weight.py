"""Faults of how weights are made from the checkpoint."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from tests.planted_bugs.faults import Fault
from tests.planted_bugs.planting import Planting, given_to, put, result, wrap

TENSOR = "fp8-kv-tensor"
STORED = "weights.stored.StoredReader."


def rounded_up(found: Any, wide: Any) -> Any:
    values, scale = found
    return values, torch.exp2(torch.ceil(torch.log2(scale)))


def to_240(found: Any, wide: Any) -> Any:
    values, scale = found
    return (values.float() * (240.0 / 448.0)).to(values.dtype), scale


def renumbered(expert_of: Any, row_of: Any) -> Any:
    """Parts of experts that read what is stored for another expert, or another of its rows."""

    def parts(found: Any, name: str, shape: tuple[int, ...], present: Any) -> Iterator[Any]:
        every = {(part.expert, part.row): part for part in found}
        rows = sorted({row for _, row in every})
        for (expert, row), part in every.items():
            key = every[expert_of(expert, shape[0]), row_of(row, rows)].key
            yield replace(part, key=key)

    return result("weights.layout._expert_parts", parts)


def up_scales_first(whole: Any, matrix: Any, window: Any, block: int = 1) -> Any:
    if block > 1 and matrix.expert is not None:
        count = window[-2].stop // -(-matrix.height // block)
        matrix = replace(matrix, number=abs(count - 1 - matrix.number))
    return whole(matrix, window, block)


def from_the_first_row(whole: Any, self: Any, name: str, out: Any, window: Any = ()) -> None:
    whole(self, name, out, window)
    if name.endswith("experts.gate_up_proj"):
        half = out.shape[1] // 2
        out[:, :half].copy_(out[:, half : 2 * half].clone())


def scales_from_the_window(planting: Planting) -> None:
    """Rows behind a border of blocks take scales by their distance from the window's start."""
    starts: list[int] = []

    def read(whole: Any, self: Any, part: Any, window: Any, out: Any) -> None:
        starts[:] = [window[0].start]
        whole(self, part, window, out)

    def spread(whole: Any, self: Any, part: Any, rows: slice, columns: slice) -> Any:
        found, height = whole(self, part, rows, columns), self._block[0]
        order = [
            max(0, (base * height - starts[0]) // height) for base in range(rows.start, rows.stop)
        ]
        return found[order]

    planting.wrap(STORED + "_read_blocks", read)
    planting.wrap(STORED + "_spread_scales", spread)


FAULTS = (
    Fault("requantised-scale-rounded-up", "values' scale is rounded up behind quantisation",
          result("weights.block_fp8.quantize_rows", rounded_up), "quantize_rows", "weight",
          recipe="fp8", echo="sgl-project/sglang#28418"),
    Fault("e4m3-to-240", "requantised blocks are scaled to 240, and dequantised for 448",
          result("weights.block_fp8.quantize_rows", to_240), "quantize_rows", "weight",
          recipe=TENSOR),
    Fault("experts-in-text-order", "experts are read in the order of their names: 0, 1, 10",
          renumbered(lambda expert, count: sorted(range(count), key=str)[expert], lambda row,
             rows: row), "mlp.experts", "weight"),
    Fault("expert-parts-up-first", "an expert's up projection is read into the gate's rows",
          renumbered(lambda expert, count: expert, lambda row,
             rows: rows[len(rows) - 1 - rows.index(row)]), "mlp.experts.gate_up_proj", "weight",
          recipe=TENSOR),
    Fault("head-weights-in-bf16", "the indexer's head weights are rounded to bf16",
          put("weights.canonical._FP32_SUFFIXES", (".mlp.gate.e_score_correction_bias",
             "rotary_emb.alpha")), "self_attn.indexer.weights_proj.weight", "weight", recipe="bf16",
          exports=True, echo="huggingface/transformers#42580"),
    Fault("stacked-scales-swapped", "the up projection's scales lie before the gate's",
          wrap("weights.layout.Matrix.shown", up_scales_first), "mlp.experts.gate_up_proj",
          "weight", recipe="fp8", model="wide-fp8"),
    Fault("parts-from-the-first-row", "an expert's gate and up are both written to the first row",
          wrap("weights.checkpoint.Checkpoint.read_into", from_the_first_row),
          "mlp.experts.gate_up_proj", "weight", recipe="bf16"),
    Fault("rope-frequencies-rounded", "RoPE's frequencies are kept to three decimals",
          given_to("frontend.build._plan_weights", inv_freq=lambda f: torch.round(f, decimals=3)),
          "rotary_emb.inv_freq", "weight", recipe=TENSOR, exports=True),
    Fault("scales-of-another-block", "a window within a block counts blocks from its own start",
          scales_from_the_window, "self_attn.w_uk", "weight", recipe="bf16", model="wide-fp8"),
    Fault("scale-grid-transposed", "the grid of scales is read columns first",
          result(STORED + "_scales", lambda found, *_: found.t().reshape(found.shape)), "_scales",
          "weight", recipe="fp8", model="wide-fp8", echo="vllm-project/vllm#47116"),
    Fault("divided-by-scale-inv", "FP8 values are divided by weight_scale_inv",
          result(STORED + "_spread_scales", lambda found, *_: found.reciprocal()), "self_attn.",
          "weight", recipe="bf16", model="wide-fp8", echo="deepseek-ai/DeepSeek-V3#2"),
    Fault("scales-tiled-not-spread", "a row of scales is tiled, not spread over its blocks",
          wrap(STORED + "_spread_scales", lambda whole, self, part, rows, columns:
             (self._scales(part, rows).repeat(1, self._block[1])[:, columns])), "self_attn.",
          "weight", recipe="bf16", model="wide-fp8"),
    Fault("control-tiny-slabs", "weights are read in slabs of four kilobytes",
          put("weights.stored._SLAB", 1 << 12), where="weight", recipe="bf16", model="wide-fp8"),
    Fault("window-start-dropped", "a run of a reshaped parameter begins at its piece",
          wrap("weights.windows._pieces", lambda whole, source, target, window: whole(source,
             target, from_zero(target, window, split=True))), "self_attn.w_uv", "weight",
          recipe="bf16"),
)  # fmt: skip


def from_zero(target: Any, window: Any, split: bool) -> Any:
    """A window that begins at 0 along the dimension that splits it, or along those before."""
    counts = [one.stop - one.start for one in window]
    cut = [dim for dim, size in enumerate(target) if counts[dim] != size]
    last = max(cut, default=-1)
    return tuple(
        slice(0, count) if (dim == last if split else dim < last) else one
        for dim, (one, count) in enumerate(zip(window, counts, strict=True))
    )
