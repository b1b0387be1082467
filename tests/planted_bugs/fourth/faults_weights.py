"""Faults in how weights are made from the checkpoint."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="window-start-dropped",
        about="a run of a reshaped parameter begins at its piece, not at the window in it",
        file="dsa_compile/weights/windows.py",
        old="start = (row * target[split] + window[split].start) * stride",
        new="start = row * target[split] * stride",
        kind="weight",
        culprit="self_attn.w_uv",
        recipe="bf16",
    ),
    Fault(
        id="scales-tiled-not-spread",
        about="a row of scales is tiled over the columns, not spread over its blocks",
        file="dsa_compile/weights/stored.py",
        old="return self._scales(part, rows).repeat_interleave(self._block[1], dim=1)[:, columns]",
        new="return self._scales(part, rows).repeat(1, self._block[1])[:, columns]",
        kind="weight",
        culprit="self_attn.",
        recipe="bf16",
        model="wide-fp8",
    ),
)
