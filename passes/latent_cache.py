"""The latent cache's write and reads, for the passes that change the format of its rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import ANY, Call, Const, Match, Node, calls, getitem
from dsa_compile.passes.shared import value_named

aten, dsa = torch.ops.aten, torch.ops.dsa


def latent_write() -> Call:
    """Pattern of a row from the raw projection ``kv`` to ``cache``: norm, rotation and write."""
    widths = [Const("rank", int), Const("rope", int)]
    parts = Call(aten.split_with_sizes.default, Node("kv"), widths, -1)
    latent = Call(dsa.rms_norm.default, getitem(parts, 0), Node("weight"), Const("eps", float))
    heads = Call(aten.view.default, getitem(parts, 1), ANY)
    tables = (value_named("cos"), value_named("sin"))
    rotated = Call(dsa.rope_interleaved.default, heads, *tables)
    key = Call(aten.squeeze.dim, rotated, 1)
    return Call(dsa.write_latent_cache.default, latent, key, Node("cache"), Node("slots"))


def rewrite_rows(
    edit: Editor,
    write: Match,
    width: int,
    written_by: tuple[Any, Sequence[object]],
    read_by: tuple[Any, Sequence[object]],
) -> None:
    """Give one cache rows of ``width`` bytes, and ops that write and read them: a whole rewrite.

    Args:
        edit: of the region.
        write: a match of :func:`latent_write`.
        width: bytes of a row.
        written_by: the op, and what it takes between the layout of the rotation and the cache.
        read_by: the attention op, and what it takes beyond ``dsa.paged_latent_attention``.
    """
    cache, block_size = write["cache"], int(write["cache"].meta["val"].shape[1])
    reads = [n for n in calls(edit.graph, dsa.paged_latent_attention.default) if cache in n.args]
    edit.retype(cache, ("P", block_size, width), torch.uint8)
    row = [write[name] for name in ("kv", "weight", "eps", "cos", "sin")]
    op, options = written_by
    edit.call(op, *row, True, *options, cache, write["slots"], before=write.root)
    edit.erase(write.root)
    for read in reads:
        edit.swap(read, _read(edit, read, *read_by))
    edit.close_site()


def _read(edit: Editor, read: fx.Node, op: Any, options: Sequence[object]) -> fx.Node:
    return edit.call(op, *read.args, *options, before=read)
