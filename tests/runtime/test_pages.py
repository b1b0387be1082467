"""Pages that are elsewhere, and requests that compute the same tokens meanwhile."""

import pytest

from dsa_compile.runtime.pages.pages import Pages
from dsa_compile.runtime.pages.tiers import PrefixNode
from dsa_compile.runtime.scheduling.limits import SchedulerConfig
from dsa_compile.runtime.scheduling.request import Request


class Everything:
    """A tier that takes all pages; what it copies ends when it is told so."""

    def __init__(self) -> None:
        self.running: list[PrefixNode] = []

    def put(self, node: PrefixNode, block: int) -> bool:
        self.running.append(node)
        return True

    def get(self, node: PrefixNode, block: int) -> None:
        self.running.append(node)

    def drop(self, node: PrefixNode) -> None: ...

    def ended(self) -> list[tuple[PrefixNode, bool]]:
        ended, self.running = self.running, []
        return [(node, True) for node in ended]


def request(name: str, length: int = 9, first: int = 0) -> Request:
    return Request(name, range(first, first + length), 1, None)


@pytest.fixture
def pages() -> Pages:
    """The pages of a prompt are in a tier alone, while another request computes the same prompt."""
    pages = Pages(SchedulerConfig(8, 4, 32, 8, 32))
    pages.tiers.append(Everything())
    pages.slow, done, other = request("slow"), request("done"), request("other", 20, 100)
    assert pages.ready(pages.slow)
    assert pages.ready(done)
    computed(pages, done)
    pages.leave(done)
    pages.settle()
    assert pages.ready(other), "the cached blocks are taken"
    pages.leave(other)
    assert [node.block for node in pages.index.match(done.token_ids)] == [-1, -1]
    return pages


def computed(pages: Pages, request: Request) -> None:
    request.num_computed = request.num_scheduled = 9
    pages.register_full_blocks(request)


def test_pages_that_are_computed_again_need_not_come_back(pages):
    computed(pages, pages.slow)
    again = request("again")
    assert pages.ready(again)
    assert again.blocks[:2] == pages.slow.blocks[:2]
    pages.check([pages.slow, again])


def test_pages_that_arrive_are_not_read_by_who_computes_the_same(pages):
    again = request("again")
    assert not pages.ready(again)
    own = list(pages.slow.blocks)
    computed(pages, pages.slow)
    assert pages.slow.blocks == own
    pages.settle()
    assert pages.ready(again)
    assert not {*again.blocks} & {*own}
    assert again.num_computed == 8
    pages.check([pages.slow, again])
    for each in (pages.slow, again):
        pages.leave(each)
    pages.settle()
    pages.check([])
    assert pages.blocks.num_available == 8
