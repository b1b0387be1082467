"""Mutations of a directory: files cut, damaged, swapped, and what else a path may be."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.json_mutations import flip


def replace(path: Path, data: bytes) -> None:
    """Write a file anew; others that share its inode keep their content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.write_bytes(data)


def mutate_tree(root: Path, rng: random.Random) -> None:
    """Change one file or directory below ``root``."""
    entries = sorted(root.rglob("*"))
    path = rng.choice(entries or [root / "new"])
    rng.choice(_CHANGES)(path, entries, rng)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _cut(path: Path, _: list[Path], rng: random.Random) -> None:
    data = _content(path)
    replace(path, data[: rng.choice((0, 1, 7, 8, len(data) // 2, max(0, len(data) - 1)))])


def _grow(path: Path, _: list[Path], rng: random.Random) -> None:
    replace(path, _content(path) + rng.randbytes(rng.choice((1, 8, 4096))))


def _flip(path: Path, _: list[Path], rng: random.Random) -> None:
    replace(path, flip(_content(path), rng))


def _remove(path: Path, _: list[Path], rng: random.Random) -> None:
    replace(path, b"")
    path.unlink()


def _swap(path: Path, entries: list[Path], rng: random.Random) -> None:
    other = _content(rng.choice(entries)) if entries else b""
    replace(path, other)


def _link(path: Path, entries: list[Path], rng: random.Random) -> None:
    target = rng.choice((*entries, Path("/etc/passwd"), Path("/"), path, Path("/dev/zero")))
    _remove(path, entries, rng)
    path.symlink_to(target)


def _fifo(path: Path, entries: list[Path], rng: random.Random) -> None:
    _remove(path, entries, rng)
    os.mkfifo(path)


def _folder(path: Path, entries: list[Path], rng: random.Random) -> None:
    _remove(path, entries, rng)
    path.mkdir()


def _extra(path: Path, entries: list[Path], rng: random.Random) -> None:
    name = rng.choice(("x", ".hidden", "a\nb", "\x1b[31m", "é", "x.safetensors", "x.json", b"\xff"))
    folder = path if path.is_dir() else path.parent
    (folder / os.fsdecode(name)).write_bytes(rng.randbytes(16))


_CHANGES: tuple[Callable[[Path, list[Path], random.Random], None], ...] = (
    *(_cut, _grow, _flip, _flip, _remove, _swap, _link, _link, _fifo, _folder, _extra),
)
