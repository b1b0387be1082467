"""The rewrites of one pass, one by one: what each took out of a graph and what it put in.

A rewrite is called a *site*. Sites are numbered within their pass in the order they are made, so
"the first n rewrites of a pass" means something: a journal with a limit stops the pass there, which
is how a wrong rewrite is found by bisection (LLVM's ``-opt-bisect-limit`` does the same).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from dsa_compile.ir.site import Site


class SiteLimit(Exception):  # noqa: N818 - ends a pass early, nothing is wrong
    """The journal's limit is reached: the next rewrite must not be made."""


@dataclass
class Journal:
    """The sites of one pass.

    Args:
        limit: rewrites to allow; None for all.
        between: called where a rewrite begins, with nothing changed for it, if another was made;
            given that other.
    """

    limit: int | None = None
    between: Callable[[Site], None] | None = None
    sites: list[Site] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether no further rewrite may be made."""
        return self.limit is not None and len(self.sites) >= self.limit


class SiteNotes:
    """Collects what happens to one graph until a rewrite is complete.

    Raises SiteLimit where a rewrite begins that the journal does not allow.
    """

    def __init__(self, region: str, journal: Journal) -> None:
        self._region = region
        self._journal = journal
        self._dead: set[fx.Node] = set()
        self._open = False
        self._clear()

    @property
    def number(self) -> int:
        """Number within the pass of the rewrite that is being made."""
        return len(self._journal.sites) + 1

    def made(self, node: fx.Node) -> None:
        """A node was created."""
        self._made.append(node)

    def begin(self) -> None:
        """The graph is about to be changed for a rewrite."""
        if not self._open and self._journal.full:
            raise SiteLimit
        if not self._open and self._journal.between and self._journal.sites:
            self._journal.between(self._journal.sites[-1])
        self._open = True

    def replaced(self, node: fx.Node) -> None:
        """The users of ``node`` now use another."""
        self._replaced.append(node)

    def erased(self, node: fx.Node) -> None:
        """``node`` is about to be erased."""
        self._dead.add(node)
        self._erased.append(node)

    def unread(self) -> list[fx.Node]:
        """Nodes that the rewrite in progress made, if nothing reads any of them and the nodes that
        they were to replace are read as before; else none.

        A model may compute values that it never reads, an operation in place among them: a
        replacement of such a value is not read either.
        """
        done = self._erased or any(not node.users for node in self._replaced)
        return [] if done or any(map(_is_live, self._made)) else list(self._made)

    def close(self) -> None:
        """The rewrite is complete."""
        made = [node for node in self._made if _is_live(node)]
        heads = [node for node in self._replaced if not node.users]
        removed = [*self._erased, *self._unused(heads, set(self._made))]
        path = next((n.meta["path"] for n in (*removed, *made) if n.meta.get("path")), "")
        names = (tuple(sorted(node.name for node in nodes)) for nodes in (removed, made))
        self._journal.sites.append(Site(self.number, self._region, path, *names))
        self._open = False
        self._clear()

    def _unused(self, heads: list[fx.Node], new: set[fx.Node]) -> list[fx.Node]:
        """``heads``, and what only they and what they leave behind used."""
        found = []
        todo = heads + [n for node in self._erased for n in node.all_input_nodes]
        while todo:
            node = todo.pop()
            if node in self._dead or node in new or node.op != "call_function":
                continue
            if node.is_impure() or not all(user in self._dead for user in node.users):
                continue
            self._dead.add(node)
            found.append(node)
            todo += node.all_input_nodes
        return found

    def _clear(self) -> None:
        self._made: list[fx.Node] = []
        self._replaced: list[fx.Node] = []
        self._erased: list[fx.Node] = []


def _is_live(node: fx.Node) -> bool:
    return bool(node.users) or node.is_impure()
