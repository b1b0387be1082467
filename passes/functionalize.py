"""Turn the reference's in-place writes into values.

Before::                                    After::

    k = new_empty(x, [B, H, S, 192])            k = cat([k_nope, k_rot], -1)
    copy_(slice(k, -1, 0, 128), k_nope)
    copy_(slice(k, -1, 128, END), k_rot)

    w = div_(gather, total)                     w = div(gather, total)

Every later use of the written tensor uses the value instead. torch's own functionalisation would do
this too, but through decompositions that add a false guard on the sequence length.

Declines: a buffer that is read before it is fully written, or written by anything but ``copy_``.
"""

import torch
from torch import fx

from dsa_compile.ir.edit import Editor
from dsa_compile.ir.match import argument, calls
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region

aten = torch.ops.aten

_OUT_OF_PLACE = {
    aten.clamp_.default: aten.clamp.default,
    aten.div_.Tensor: aten.div.Tensor,
    aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
    aten.scatter_.value: aten.scatter.value,
    aten.index_put_.default: aten.index_put.default,
}
_END = 2**63 - 1
# Views of a buffer that are written: a slice, or all of it.
_PARTS = (aten.slice.Tensor, aten.alias.default)


class Functionalize(RegionPass):
    """Replace mutation by values."""

    requires = ("strip_noise",)

    def expects(self, program: Program, region: Region) -> int | None:
        """Every buffer and every other mutation; nothing after this pass may rely on mutation."""
        return sum(
            node.target is aten.new_empty.default or (_mutates(node) and not _fills_buffer(node))
            for node in region.graph.nodes
        )

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Filled buffers first, then in-place operators."""
        for node in calls(edit.graph, aten.new_empty.default):
            self._filled_buffer(edit, node)
        for node in list(edit.graph.nodes):
            if _mutates(node) and not _fills_buffer(node):
                self._in_place(edit, node)

    def _in_place(self, edit: Editor, node: fx.Node) -> None:
        written = node.args[0]
        assert isinstance(written, fx.Node)
        target = _OUT_OF_PLACE.get(node.target)  # type: ignore[call-overload]
        views = [u for u in written.users if u is not node and any(node < use for use in u.users)]
        aliases = [n for n in (written, *views) if _is_view(n)]
        if target is None or aliases:
            reason = "writes in place" + (f", and {aliases[0]} is a view" if aliases else "")
            edit.decline(node, reason)
            return
        value = edit.call(target, *node.args, before=node)
        for user in [u for u in written.users if u not in (node, value) and node < u]:
            user.replace_input_with(written, value)
        edit.swap(node, value)
        edit.erase(node)
        edit.close_site()

    def _filled_buffer(self, edit: Editor, buffer: fx.Node) -> None:
        width, last = buffer.meta["val"].shape[-1], buffer.meta["val"].ndim - 1
        writes: list[tuple[int, int, fx.Node]] = []
        readers: list[fx.Node] = []
        for view in buffer.users:
            copies = [use for use in view.users if _fills_buffer(use) and use.args[0] is view]
            if not copies or len(view.users) > 1:
                readers.append(view)
            elif view.target is aten.alias.default:
                writes.append((0, width, copies[0]))
            elif argument(view, "dim") not in (-1, last):
                readers.append(view)
            else:
                start, end = argument(view, "start"), argument(view, "end")
                writes.append((start, width if end == _END else end, copies[0]))
        writes.sort(key=lambda write: write[:2])
        reason = _not_filled(writes, readers, width)
        if reason:
            edit.decline(buffer, reason, len(writes))
            return
        copies = [copy for _, _, copy in writes]
        values = [copy.args[1] for copy in copies]
        value = edit.call(aten.cat.default, values, -1, before=max(copies))
        for reader in readers:
            reader.replace_input_with(buffer, value)
        for copy in copies:
            written = copy.args[0]
            assert isinstance(written, fx.Node)
            edit.erase(copy)
            edit.erase(written)
        edit.replace(buffer, value)


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and bool(schema.is_mutable)


def _is_view(node: fx.Node) -> bool:
    """Whether the result may share memory with an argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def _fills_buffer(node: fx.Node) -> bool:
    if node.target is not aten.copy_.default:
        return False
    view = node.args[0]
    assert isinstance(view, fx.Node)
    buffer = view.args[0] if view.target in _PARTS else None
    return isinstance(buffer, fx.Node) and buffer.target is aten.new_empty.default


def _not_filled(
    writes: list[tuple[int, int, fx.Node]], readers: list[fx.Node], width: int
) -> str | None:
    edges = [0, *(end for _, end, _ in writes)]
    if [start for start, _, _ in writes] != edges[:-1] or edges[-1] != width:
        return f"writes cover {[write[:2] for write in writes]} of a buffer {width} wide"
    full = max(copy for _, _, copy in writes)
    early = next((reader for reader in readers if reader < full), None)
    return None if early is None else f"is read by {early} before it is full"
