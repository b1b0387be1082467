"""Faults in how weights are made from the checkpoint."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="control-tiny-slabs",
        about="weights are read in slabs of four kilobytes",
        file="dsa_compile/weights/stored.py",
        old="_SLAB = 8 << 20",
        new="_SLAB = 1 << 12",
        kind="weight",
        culprit="",
        recipe="bf16",
        model="wide-fp8",
        control=True,
    ),
    Fault(
        id="ranks-heads-from-the-other-end",
        about="a rank reads the other rank's part of what is cut along its first dimension",
        file="dsa_compile/weights/ranks.py",
        old="            parts = tuple(Narrow(dim, start, length, whole) for start in starts)\n",
        new=(
            "            if dim == 1 and stacked == 1:\n"
            "                starts = [(count - 1) * length - starts[0]]\n"
            "            parts = tuple(Narrow(dim, start, length, whole) for start in starts)\n"
        ),
        kind="weight",
        culprit="self_attn.o_proj.weight",
        options=(("tp", 2),),
    ),
    Fault(
        id="windows-from-the-first-head",
        about="of a reshaped parameter a window is read from its first piece on",
        file="dsa_compile/weights/windows.py",
        old="row = row * target[dim] + window[dim].start + number",
        new="row = row * target[dim] + number",
        kind="weight",
        culprit="self_attn.w_uk",
        recipe="bf16",
        options=(("tp", 2),),
    ),
)
