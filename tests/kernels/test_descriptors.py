"""File descriptors that ranks give each other, without a GPU."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from dsa_compile.errors import UserError
from dsa_compile.kernels.cuda.descriptors import exchange_descriptors


def words_of(rank: int) -> str:
    return f"of rank {rank}"


def exchanged(store: HashStore, rank: int, world: int, patience: float = 30.0) -> list[str | None]:
    """Texts of the files that this rank was given, by rank."""
    own = os.memfd_create("own")
    os.write(own, words_of(rank).encode())
    found = exchange_descriptors(store, rank, world, own, patience)
    os.close(own)
    texts = []
    for descriptor in found:
        if descriptor is not None:
            texts.append(os.pread(descriptor, 100, 0).decode())
            os.close(descriptor)
        else:
            texts.append(None)
    return texts


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_rank_has_the_others_files(world: int) -> None:
    with ThreadPoolExecutor(world) as pool:
        store = HashStore()
        found = list(pool.map(lambda rank: exchanged(store, rank, world), range(world)))
    for rank, texts in enumerate(found):
        assert texts == [None if other == rank else words_of(other) for other in range(world)]


def test_a_process_that_met_others_before_meets_new_ones() -> None:
    """Each time over a store of its own, as when an engine is loaded again."""
    for _ in range(2):
        store = HashStore()
        peer = threading.Thread(target=exchanged, args=(store, 1, 2))
        peer.start()
        assert exchanged(store, 0, 2) == [None, words_of(1)]
        peer.join()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(UserError, match=r"rank 1 did not come to share memory within 0\.2 s"):
        exchanged(HashStore(), 0, 3, 0.2)


def test_a_rank_that_gives_nothing_is_named(tmp_path: Path) -> None:
    """A socket that can be reached, from whose owner nothing came."""
    store = HashStore()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen(1)
        store.set("shared-buffer/1", str(tmp_path / "s"))
        with pytest.raises(UserError, match=r"rank 1 did not come .* within 0\.2 s"):
            exchanged(store, 0, 2, 0.2)


def test_a_rank_that_ends_before_it_gives_is_named(tmp_path: Path) -> None:
    store = HashStore()

    def leave() -> None:
        store.wait(["shared-buffer/0"])
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(store.get("shared-buffer/0").decode())

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as reached:
        reached.bind(str(tmp_path / "s"))
        reached.listen(1)
        store.set("shared-buffer/1", str(tmp_path / "s"))
        leaving = threading.Thread(target=leave)
        leaving.start()
        with pytest.raises(UserError, match="rank 1 ended, or is on another machine"):
            exchanged(store, 0, 2)
        leaving.join()


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    store = HashStore()
    store.set("shared-buffer/1", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="rank 1 ended, or is on another machine"):
        exchanged(store, 0, 2)


def test_too_long_a_folder_is_refused(monkeypatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(UserError, match="set TMPDIR to a shorter folder"):
        exchanged(HashStore(), 0, 2)
