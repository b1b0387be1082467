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
from dsa_compile.ir.match import NearMiss, argument, calls
from dsa_compile.ir.passes import RegionPass
from dsa_compile.ir.program import Program
from dsa_compile.ir.region import Region

aten = torch.ops.aten

_OUT_OF_PLACE = {
    aten.div_.Tensor: aten.div.Tensor,
    aten.scatter_.value: aten.scatter.value,
    aten.index_put_.default: aten.index_put.default,
}
_END = 2**63 - 1


class Functionalize(RegionPass):
    """Replace mutation by values."""

    requires = ("strip_noise",)

    def expects(self, program: Program, region: Region) -> int | None:
        """Every mutating node; nothing after this pass may rely on mutation."""
        return sum(
            node.target is aten.new_empty.default or node.target in _OUT_OF_PLACE
            for node in region.graph.nodes
        )

    def rewrite(self, edit: Editor, program: Program) -> None:
        """Filled buffers first, then in-place operators."""
        for node in calls(edit.graph, aten.new_empty.default):
            self._filled_buffer(edit, node)
        for node in calls(edit.graph, *_OUT_OF_PLACE):
            written = node.args[0]
            assert isinstance(written, fx.Node)
            target = _OUT_OF_PLACE[node.target]  # type: ignore[index]
            value = edit.call(target, *node.args, before=node)
            for user in [u for u in written.users if u not in (node, value) and node < u]:
                user.replace_input_with(written, value)
            edit.replace(node, value)
            edit.erase(node)

    def _filled_buffer(self, edit: Editor, buffer: fx.Node) -> None:
        writes: list[tuple[int, int, fx.Node]] = []
        width = buffer.meta["val"].shape[-1]
        last = buffer.meta["val"].ndim - 1
        for view in buffer.users:
            if view.target is not aten.slice.Tensor or argument(view, "dim") not in (-1, last):
                continue
            for copy in view.users:
                if copy.target is aten.copy_.default and copy.args[0] is view:
                    end = argument(view, "end")
                    writes.append((argument(view, "start"), width if end == _END else end, copy))
        writes.sort(key=lambda write: write[0])
        edges = [0, *(end for _, end, _ in writes)]
        if [start for start, _, _ in writes] != edges[:-1] or edges[-1] != width:
            reason = f"writes cover {[w[:2] for w in writes]} of a buffer {width} wide"
            edit.note([NearMiss(buffer.meta["path"], buffer.name, reason, len(writes))])
            return
        copies = [copy for _, _, copy in writes]
        value = edit.call(aten.cat.default, [c.args[1] for c in copies], -1, before=copies[-1])
        for user in list(buffer.users):
            if all(use in copies for use in user.users) and user.target is aten.slice.Tensor:
                continue
            user.replace_input_with(buffer, value)
        for copy in copies:
            (written,) = copy.all_input_nodes[:1]
            edit.erase(copy)
            edit.erase(written)
        edit.replace(buffer, value)
