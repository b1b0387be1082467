"""Opening files whose names came from elsewhere: regular ones only, and no more than a limit.

A pipe would block for ever, a device never ends, and a text of gigabytes would fill the memory of
the parser. Writing replaces a file as a whole.
"""

import errno
import os
import secrets
import stat
from io import FileIO
from pathlib import Path

LARGEST_JSON = 64 << 20
"""Bytes; the index of the released checkpoint, the largest such file, has 9 MB."""


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read, without a buffer; links are followed.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a directory.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a path with a null character
        raise OSError(errno.EINVAL, "not a path", repr(str(path))) from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return FileIO(descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int = LARGEST_JSON) -> bytes:
    """The content of a regular file.

    Args:
        path: the file; links are followed.
        most: bytes that it may have.

    Raises:
        OSError: as :func:`open_regular`, or it is larger.
    """
    with open_regular(path) as file:
        pieces, left = [], most + 1
        while left and (piece := file.read(min(left, 8 << 20))):
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return b"".join(pieces)


def write_whole(path: Path, text: str) -> None:
    """Write a file, or replace it, whole or not at all; several processes may do so at once.

    Raises:
        OSError: it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with scratch.open("x", encoding="utf-8") as file:
            file.write(text)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
