"""File descriptors that ranks of one machine give each other, over sockets of their own."""

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from dsa_compile.errors import UserError

_RANK_BYTES = 2


def exchange_descriptors(
    store: Store, rank: int, world: int, own: int, patience: float
) -> list[int | None]:
    """Give every other rank a file descriptor, and take theirs; all ranks do so together.

    Args:
        store: by which they find each other; the first exchange over it.
        rank: of this process.
        world: how many there are.
        own: the descriptor to give, which stays open here.
        patience: seconds to wait for a rank.

    Returns:
        By rank a descriptor of this process, which the caller closes, and None for its own.

    Raises:
        UserError: a rank did not come in time, or ended; the message names it.
    """
    found: list[int | None] = [None] * world
    with _listener(world, patience) as (listener, path):
        store.set(_key(rank), path)
        for other in range(world):
            if other != rank:
                _give(_address(store, other, patience), other, rank, own, patience)
        missing = set(range(world)) - {rank}
        try:
            while missing:
                other, descriptor = _take(listener)
                found[other] = descriptor
                missing.remove(other)
        except (TimeoutError, EOFError) as error:
            close_descriptors(found)
            late = isinstance(error, TimeoutError)
            raise _late(min(missing), patience) if late else _ended(min(missing)) from None
    return found


def close_descriptors(descriptors: Iterable[int | None]) -> None:
    """Close those that were taken and are not used."""
    for descriptor in descriptors:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def _listener(world: int, patience: float) -> Iterator[tuple[socket.socket, str]]:
    """A socket in a folder that nobody else may enter."""
    with (
        tempfile.TemporaryDirectory(prefix="dsa-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = str(Path(folder) / "s")
        try:
            listener.bind(path)
        except OSError as error:
            raise UserError(
                f"{path}: no socket can be made there: {error}; set TMPDIR to a shorter folder "
                "of this machine"
            ) from None
        listener.listen(world)
        listener.settimeout(patience)
        yield listener, path


def _address(store: Store, other: int, patience: float) -> str:
    try:
        store.wait([_key(other)], timedelta(seconds=patience))
    except RuntimeError:
        raise _late(other, patience) from None
    return store.get(_key(other)).decode()


def _give(path: str, other: int, rank: int, own: int, patience: float) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(patience)
        try:
            peer.connect(path)
            socket.send_fds(peer, [rank.to_bytes(_RANK_BYTES, "little")], [own])
        except OSError:
            raise _ended(other) from None


def _take(listener: socket.socket) -> tuple[int, int]:
    peer, _ = listener.accept()
    with peer:
        peer.settimeout(listener.gettimeout())
        data, descriptors, _, _ = socket.recv_fds(peer, _RANK_BYTES, 1)
    if not descriptors:
        raise EOFError("a rank ended before it gave its descriptor")
    return int.from_bytes(data, "little"), descriptors[0]


def _key(rank: int) -> str:
    return f"shared-buffer/{rank}"


def _ended(other: int) -> UserError:
    return UserError(f"rank {other} ended, or is on another machine, while ranks shared memory")


def _late(other: int, patience: float) -> UserError:
    return UserError(f"rank {other} did not come to share memory within {patience:g} s")
