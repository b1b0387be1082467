"""Faults of passes."""

from tests.planted_bugs.second.fault import Fault

FAULTS = (
    Fault(
        id="index-keys-by-position",
        about="index keys are written to the row of their position, not to their slot",
        file="passes/insert_paged_caches.py",
        old='edit.call(dsa.write_index_cache.default, m["ik"], cache, slots, before=at)',
        new=(
            'places = edit.input(Role.BATCH, "positions", ("T",), torch.int64)\n'
            '        edit.call(dsa.write_index_cache.default, m["ik"], cache, places, before=at)'
        ),
        kind="pass",
        culprit="insert_paged_caches",
        recipe="bf16",
    ),
    Fault(
        id="key-norm-bias-for-weight",
        about="weight and bias of the index key's norm change places where it is quantised",
        file="passes/quantize_indexer.py",
        old='key = [write[name] for name in ("k", "weight", "bias", "eps", "cos", "sin")]',
        new='key = [write[name] for name in ("k", "bias", "weight", "eps", "cos", "sin")]',
        kind="pass",
        culprit="quantize_indexer",
        recipe="fp8",
    ),
    Fault(
        id="moved-norm-keeps-its-weight",
        about="the norm moved behind a layer keeps that layer's weight, not the next one's",
        file="passes/fuse_add_norm_across_layers.py",
        old="        weight = _next_norm(edit, program, entry)\n        fuse(",
        new=(
            "        program.weights.define(edit.region.kind, NEXT_NORM, entry)\n"
            "        weight = edit.input(Role.WEIGHT, NEXT_NORM, entry.shape, entry.torch_dtype)\n"
            "        fuse("
        ),
        kind="pass",
        culprit="fuse_add_norm_across_layers",
        recipe="bf16",
    ),
    Fault(
        id="values-begin-a-row-early",
        about="value rows of a head are cut from one row too early on, its last key row first",
        file="passes/absorb_mla.py",
        old="W_UV: (dn, dv)}",
        new="W_UV: (dn - 1, dv)}",
        kind="pass",
        culprit="absorb_mla",
        recipe="bf16",
    ),
    Fault(
        id="long-variant-rewritten",
        about="the copy keeps the indexer and the original loses it: long lists rows, short scores",
        file="passes/split_short_long.py",
        old="edit = Editor(short, program.world, self.name)",
        new="edit = Editor(region, program.world, self.name)",
        kind="pass",
        culprit="split_short_long",
    ),
)
