"""Faults of how a rank's part of a weight is made."""

from tests.planted_bugs.second.fault import Fault

TP2 = (("tp", 2),)

FAULTS = (
    Fault(
        id="pieces-of-a-rank-in-a-run",
        about="a rank reads as many pieces one behind another, not its part of each",
        file="dsa_compile/weights/ranks.py",
        old="starts = [(piece * count + ranks[axis]) * length for piece in range(stacked)]",
        new="starts = [(ranks[axis] * stacked + piece) * length for piece in range(stacked)]",
        kind="weight",
        culprit="mlp.experts.gate_up_proj",
        options=TP2,
    ),
    Fault(
        id="scales-of-the-first-columns",
        about="stored scales of a rank's columns are those of the first columns",
        file="dsa_compile/weights/stored.py",
        old="across = slice(columns.start // BLOCK, blocks(columns.stop))",
        new="across = slice(0, blocks(columns.stop - columns.start))",
        kind="weight",
        culprit="self_attn.o_proj.weight_scale_inv",
        recipe="fp8",
        model="broad-fp8",
        options=TP2,
    ),
    Fault(
        id="first-columns-quantised",
        about="a rank's columns are quantised from the first columns of the parameter",
        file="dsa_compile/weights/stored.py",
        old=(
            "            home.read_rows(part.key, matrix.first + row * matrix.width + left,"
            " matrix.width, slab)\n"
        ),
        new=(
            "            home.read_rows(part.key, matrix.first + row * matrix.width,"
            " matrix.width, slab)\n"
        ),
        kind="weight",
        culprit="self_attn.o_proj.weight",
        recipe="fp8-kv-tensor",
        model="broad",
        options=TP2,
    ),
    Fault(
        id="columns-begin-at-the-first",
        about="columns of a plain parameter are read from its first one on, whatever the window",
        file="dsa_compile/weights/stored.py",
        old=("first += window[0].start * stride + (window[1].start if len(shape) == 2 else 0)"),
        new="first += window[0].start * stride",
        kind="weight",
        culprit="self_attn.o_proj.weight",
        options=(("tp", 2), ("shard_embedding", True)),
    ),
    Fault(
        id="heads-of-the-first-rank",
        about="key and value matrices of a rank's heads are read from the first head on",
        file="dsa_compile/weights/windows.py",
        old="row = row * target[dim] + window[dim].start + number",
        new="row = row * target[dim] + number",
        kind="weight",
        culprit="self_attn.w_uk",
        recipe="bf16",
        options=(("tp", 2), ("ep", 2)),
    ),
    Fault(
        id="spread-scales-of-the-first-columns",
        about="scales of a rank's columns are spread from the first block of the row on",
        file="dsa_compile/weights/stored.py",
        old="return self._scales(part, rows).repeat_interleave(self._block[1], dim=1)[:, columns]",
        new=(
            "spread = self._scales(part, rows).repeat_interleave(self._block[1], dim=1)\n"
            "        return spread[:, : columns.stop - columns.start]"
        ),
        kind="weight",
        culprit="self_attn.o_proj.weight",
        recipe="bf16",
        model="broad-fp8",
        options=TP2,
    ),
    Fault(
        id="pieces-by-the-place-in-the-lane",
        about="of stacked pieces a rank reads the part of its place in its lane, not among all",
        file="dsa_compile/weights/ranks.py",
        old="starts = [(piece * count + ranks[axis]) * length for piece in range(stacked)]",
        new=(
            'own = ranks[axis] if stacked == 1 else ranks.get("tp", 0)\n'
            "            starts = [(piece * count + own) * length for piece in range(stacked)]"
        ),
        kind="weight",
        culprit="mlp.experts.gate_up_proj",
        recipe="bf16",
        options=(("tp", 2), ("dp", 2)),
    ),
    Fault(
        id="control-ranks-of-all-lanes-in-another-order",
        about="ranks of all lanes are numbered place by place, not lane by lane",
        file="dsa_compile/facts/layout.py",
        old="return {TP: rank % self.tp, DP: rank // self.tp, WORLD: rank}",
        new=(
            "world = rank % self.tp * self.dp + rank // self.tp\n"
            "        return {TP: rank % self.tp, DP: rank // self.tp, WORLD: world}"
        ),
        kind="weight",
        culprit="",
        control=True,
        options=(("tp", 2), ("dp", 2), ("ep", 4)),
    ),
)
