"""Paths that a manifest may name: relative, plain, and inside the directory they belong to."""

import re
from pathlib import Path

# A leading dot is left out too: it hides a file, and two of them climb.
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


def is_plain(path: str) -> bool:
    """Whether a path is relative, goes only downwards, and has only plain characters."""
    return len(path) <= 500 and all(_PART.fullmatch(part) for part in path.split("/"))


def resolve_inside(root: Path, path: str) -> Path | None:
    """The file a plain path names, or None if it is no regular file inside ``root``.

    Symbolic links are followed first, so one that leads out of ``root`` gives None.
    """
    assert is_plain(path)
    try:
        resolved = (root / path).resolve(strict=True)
    except (OSError, RuntimeError):  # missing, unreadable, or a loop of links
        return None
    return resolved if resolved.is_file() and resolved.is_relative_to(root.resolve()) else None
