"""The one way to change a graph: insertion, typing and provenance in one place.

Passes never touch ``meta``, choose insertion points by hand or call ``recompile``.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dsa_compile.errors import CompileError
from dsa_compile.ir.dims import FakeWorld, same_type
from dsa_compile.ir.journal import Journal, SiteNotes
from dsa_compile.ir.match import Call, Match, find
from dsa_compile.ir.program import add_input
from dsa_compile.ir.refusal import introduce, refused_call
from dsa_compile.ir.region import Region, Role
from dsa_compile.ir.site import NearMiss


class Editor:
    """Edits one region on behalf of one pass.

    New nodes get their fake value at once (so a wrong rewrite fails where it is made), the module
    path of the node they stand for, and the name of the pass.

    A rewrite that :meth:`replace` or :meth:`reroute` makes is complete with that call; one of
    several steps (:meth:`take`, :meth:`swap`, :meth:`erase`) ends with :meth:`close_site`.

    Args:
        region: the graph to edit.
        world: types new nodes.
        pass_name: whose edits these are.
        journal: of the pass; keeps its rewrites, and may limit them.
    """

    def __init__(
        self, region: Region, world: FakeWorld, pass_name: str, journal: Journal | None = None
    ) -> None:
        self.region = region
        self.graph = region.graph
        self.world = world
        self.pass_name = pass_name
        self.rewrites = 0
        self.left = 0
        self.misses: list[NearMiss] = []
        self.remarks: list[str] = []
        self._notes = SiteNotes(region.name, journal or Journal())
        self._swapped: dict[fx.Node, fx.Node] = {}

    def call(
        self,
        target: Any,
        *args: Any,
        before: fx.Node,
        name: str | None = None,
        path: str | None = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Insert a call in front of ``before``.

        Args:
            target: the operator.
            args: its arguments. A node that was replaced stands for its replacement: matches are
                found before the first of them is rewritten, and one may read another's root.
            before: where.
            name: what a reader sees in listings; the op's own name if None.
            path: the module the call stands for; that of ``before`` if None.
            kwargs: its arguments by name.

        Raises:
            CompileError: the operator does not take these arguments.
            SiteLimit: this call would begin a rewrite that the journal does not allow; so do the
                other methods that change the graph.
        """
        self._notes.begin()
        path = before.meta.get("path", "") if path is None else path
        args, kwargs = fx.node.map_arg((args, kwargs), self._present)
        value = self._typed(path, target, args, kwargs)
        name = name or getattr(target, "_opname", None)
        with self.graph.inserting_before(before):
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta.update(path=path, origin=self.pass_name, site=self._notes.number, val=value)
        self._notes.made(node)
        return node

    def _present(self, node: fx.Node) -> fx.Node:
        while node in self._swapped:
            node = self._swapped[node]
        return node

    def _typed(self, path: str, target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self.world.evaluate(target, args, kwargs)
        except Exception as error:  # torch's fakes raise what they like
            call = target, args, kwargs
            raise refused_call(self.pass_name, path, call, error) from error

    def unpack(self, several: fx.Node, *names: str, before: fx.Node) -> list[fx.Node]:
        """The results of a call with several, in order."""
        return [
            self.call(operator.getitem, several, index, before=before, name=name)
            for index, name in enumerate(names)
        ]

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every user of ``old`` use ``new``, of the same type: a whole rewrite."""
        self.swap(old, new)
        self.close_site()

    def begin_site(self) -> None:
        """A rewrite begins; to be said before anything outside the graph is changed for it.

        Raises:
            SiteLimit: it is not allowed.
        """
        self._notes.begin()

    def close_site(self) -> None:
        """A rewrite is complete.

        Raises:
            CompileError: nothing reads what it has made, and the graph computes what it did before.
        """
        if unread := self._notes.unread():
            where = unread[-1].meta.get("path") or "top"
            raise CompileError(
                f"pass {self.pass_name}: {where}: nothing reads what site {self._notes.number} "
                f"makes: {', '.join(node.name for node in unread)}"
            )
        self._notes.close()
        self.rewrites += 1

    def take(self, several: fx.Node, index: int, old: fx.Node, name: str) -> None:
        """Let result ``index`` of a call with several stand for ``old``: a step of a rewrite."""
        self.swap(old, self.call(operator.getitem, several, index, before=old, name=name))

    def reroute(self, old: fx.Node, new: fx.Node) -> None:
        """Replace ``old`` where the type changes: everything behind ``new`` is typed again."""
        self._notes.begin()
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        for node in self.graph.nodes:
            if node.op == "call_function" and new < node:
                path = node.meta.get("path", "")
                node.meta["val"] = self._typed(path, node.target, node.args, node.kwargs)
        self._notes.replaced(old)
        self.close_site()

    def swap(self, old: fx.Node, new: fx.Node) -> None:
        """Replace one of several values of a site: a step of a rewrite.

        Raises:
            CompileError: they are of different types.
        """
        self._notes.begin()
        if not same_type(old.meta["val"], new.meta["val"]):
            raise CompileError(
                f"pass {self.pass_name}: {old.meta.get('path') or 'top'}: {introduce(old)}; its "
                f"replacement {introduce(new)}"
            )
        old.replace_all_uses_with(new)
        self._swapped[old] = new
        self._notes.replaced(old)

    def merge_duplicates(self) -> None:
        """Keep one of every two calls of the same pure operator with the same arguments."""
        seen: dict[Any, fx.Node] = {}
        for node in list(self.graph.nodes):
            if node.op != "call_function" or node.is_impure():
                continue
            # lists of arguments are not hashable; their text is, and names are unique in a graph
            key = (node.target, str(node.args), str(node.kwargs))
            first = seen.setdefault(key, node)
            if first is not node:
                node.replace_all_uses_with(first)
                self.graph.erase_node(node)

    def erase(self, node: fx.Node) -> None:
        """Remove a node that nobody uses and that elimination of dead code would keep."""
        self._notes.begin()
        self._notes.erased(node)
        self.graph.erase_node(node)

    def input(
        self, role: Role, key: str, shape: tuple[int | str, ...], dtype: torch.dtype
    ) -> fx.Node:
        """The region's input of that role and key; added if it is new."""
        node = add_input(self.region, self.world, role, key, shape, dtype)
        node.meta["origin"] = node.meta["origin"] or self.pass_name
        return node

    def result(self, name: str) -> fx.Node:
        """The node that the region returns under a name."""
        return self.region.result(name)

    def returns(self, name: str, node: fx.Node, after: str | None = None) -> None:
        """Return a node under a name: a step of a rewrite.

        Args:
            name: of the result; one that is there already is replaced, whatever its type.
            node: what to return.
            after: of a new result, the name of the one that it follows; the last one if None.
        """
        self._notes.begin()
        names, output = list(self.region.outputs), self.graph.output_node()
        results = [self.result(name) for name in names]
        if name in names:
            at = names.index(name)
            self._notes.replaced(results[at])
            results[at] = node
        else:
            at = len(names) if after is None else names.index(after) + 1
            names.insert(at, name)
            results.insert(at, node)
        output.args = (tuple(results),)
        self.region.outputs = tuple(names)

    def retype(self, input_: fx.Node, shape: tuple[int | str, ...], dtype: torch.dtype) -> None:
        """Give an input another type; the caller replaces whatever reads it."""
        self._notes.begin()
        input_.meta["val"] = self.world.tensor(shape, dtype)

    def matches(self, pattern: Call) -> list[Match]:
        """The sites of a pattern; where it nearly matches is kept for the pass's record."""
        found = find(self.graph, pattern)
        self.note(found.misses)
        return found.found

    def decline(self, at: Match | fx.Node, reason: str, depth: int | None = None) -> None:
        """Leave a site as it is, and keep the reason for the pass's record.

        Args:
            at: the match, or the node that is at fault.
            reason: why, to read after the name of the node.
            depth: how much of the site did fit; the nodes of a match, one for a node.
        """
        node = at.root if isinstance(at, Match) else at
        fitting = len(at.interior) if isinstance(at, Match) else 1
        self.note([miss_at(node, reason, fitting if depth is None else depth)])

    def leave(self, at: Match | fx.Node, reason: str) -> None:
        """Leave a site that fits as it is, because that is better: no broken promise.

        Args:
            at: the match, or the node.
            reason: why, to read after the name of the node.
        """
        self.decline(at, reason)
        self.left += 1

    def note(self, misses: list[NearMiss]) -> None:
        """Keep near-misses for the pass's record."""
        self.misses += [replace(miss, region=self.region.name) for miss in misses]

    def remark(self, text: str) -> None:
        """Keep a line for the pass's record: what its reader should know of this region."""
        self.remarks.append(f"{self.region.name}: {text}")

    def sweep(self) -> None:
        """Drop dead nodes and inputs; called by the pass manager after every pass."""
        self.graph.eliminate_dead_code()
        for node in self.region.inputs():
            if not node.users:
                self.graph.erase_node(node)
        self.graph.lint()


def miss_at(node: fx.Node, reason: str, depth: int) -> NearMiss:
    """The near-miss at a node; ``depth`` says how much of the site did fit."""
    return NearMiss(node.meta.get("path", ""), node.name, reason, depth)
