"""Which ranks meet through which memory, and what is left to NCCL; without a GPU."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

pytest.importorskip("cuda.bindings")

from dsa_compile.errors import UserError
from dsa_compile.facts.layout import Layout
from dsa_compile.kernels.cuda.shared_peer_memory import shared_peer_memories
from dsa_compile.runtime.ranks import nccl
from dsa_compile.runtime.ranks.nccl import NcclCommunicator

GROUPS = {
    Layout(tp=2): {"tp": (0, 1)},
    Layout(dp=2, ep=2): {"dp": (0, 1)},
    Layout(tp=2, dp=4): {"tp": (0, 1), "dp": (0, 2, 4, 6)},
}


class Memory:
    """Takes two rows, and says what it was asked for."""

    def __init__(self, axis: str, owner: SimpleNamespace | None = None) -> None:
        self.axis, self.owner = axis, owner

    def takes(self, x: Tensor) -> bool:
        return len(x) == 2

    scatters = takes

    def gathers(self, xs: tuple[Tensor, ...]) -> bool:
        return all(map(self.takes, xs))

    def all_reduce(self, x: Tensor) -> str:
        return f"{self.axis} sum"

    def reduce_scatter(self, x: Tensor) -> str:
        return f"{self.axis} share"

    def all_gather(self, xs: tuple[Tensor, ...]) -> list[str]:
        return [f"{self.axis} rows" for _ in xs]


@pytest.fixture
def by_nccl(monkeypatch) -> list[str]:
    """Calls of NCCL, by name and in order."""
    calls: list[str] = []

    def asked(name: str):
        return lambda *args, **kwargs: calls.append(name)

    @contextmanager
    def together(group):
        calls.append("begin")
        yield
        calls.append("end")

    fake = SimpleNamespace(
        is_initialized=lambda: False,
        init_process_group=lambda *args, **kwargs: None,
        new_group=lambda ranks: tuple(ranks),
        all_reduce=asked("all_reduce"),
        all_gather_into_tensor=asked("all_gather"),
        reduce_scatter_tensor=asked("reduce_scatter"),
    )
    monkeypatch.setattr(nccl, "dist", fake)
    c10d = SimpleNamespace(_coalescing_manager=together)
    monkeypatch.setattr(nccl, "distributed_c10d", c10d)
    monkeypatch.setattr(nccl, "PrefixStore", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return calls


@pytest.mark.parametrize("layout", GROUPS, ids=str)
def test_every_axis_has_a_memory_of_its_own(monkeypatch, by_nccl, layout: Layout) -> None:
    asked = []

    def made(store, rank: int, world: int, groups, patience: float):
        asked.append((rank, world, dict(groups)))
        return {axis: Memory(axis) for axis in groups}

    monkeypatch.setattr(nccl, "shared_peer_memories", made)
    ranks = NcclCommunicator(None, 0, layout, 1.0, symmetric=True)
    assert asked == [(0, layout.world, GROUPS[layout])]
    few, many = torch.zeros(2, 8), torch.zeros(8, 8)
    for axis, members in GROUPS[layout].items():
        count = len(members)
        assert ranks.all_reduce(few, axis, count) == f"{axis} sum"
        assert ranks.gather(few, axis, count) == f"{axis} rows"
        assert ranks.gather_many([few, few], axis, count) == [f"{axis} rows"] * 2
        assert ranks.reduce_scatter(few, axis, count) == f"{axis} share"
        assert by_nccl == []
        ranks.all_reduce(many, axis, count)
        ranks.gather(many, axis, count)
        ranks.reduce_scatter(many, axis, count)
        assert by_nccl == ["all_reduce", "all_gather", "reduce_scatter"]
        by_nccl.clear()
        found = ranks.gather_many([few, many], axis, count)
        assert by_nccl == ["begin", "all_gather", "all_gather", "end"]
        assert [x.shape for x in found] == [(count, 2, 8), (count, 8, 8)]
        by_nccl.clear()
    for axis in {"tp", "dp"} - GROUPS[layout].keys():
        assert ranks.peer_memory(axis) is None


def test_closing_frees_the_memory_of_every_axis(monkeypatch, by_nccl) -> None:
    freed = []
    owner = SimpleNamespace(close=lambda: freed.append(1))
    monkeypatch.setattr(
        nccl, "shared_peer_memories", lambda *args: {axis: Memory(axis, owner) for axis in args[3]}
    )
    ranks = NcclCommunicator(None, 0, Layout(tp=2, dp=4), 1.0, symmetric=True)
    ranks.abort()
    assert not freed
    ranks.close()
    assert freed


def test_nccl_alone_is_asked_for_no_memory(monkeypatch, by_nccl) -> None:
    monkeypatch.delattr(nccl, "shared_peer_memories")
    ranks = NcclCommunicator(None, 1, Layout(dp=2, ep=2), 1.0, symmetric=False)
    ranks.gather(torch.zeros(2, 8), "dp", 2)
    assert by_nccl == ["all_gather"]


def test_more_ranks_than_kernels_take_are_refused() -> None:
    with pytest.raises(UserError, match="16 ranks: they are for at most 8; load with collectives="):
        shared_peer_memories(HashStore(), 0, 16, {"tp": range(2), "dp": range(16)}, 1.0)
