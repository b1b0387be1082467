"""Content hashes of weight files, several files at a time."""

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from dsa_compile.errors import UserError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 8 << 20
# Enough to keep a disk busy; hashlib releases the interpreter lock.
_THREADS = 4


def hash_files(
    paths: Iterable[Path],
    error: type[UserError],
    *,
    trust_hub_cache: bool,
    progress: Callable[[int], None] | None = None,
) -> dict[Path, str]:
    """Hex SHA-256 of each file's content.

    Args:
        paths: the files.
        error: what to raise for a file that cannot be read.
        trust_hub_cache: take the hash from the name where a file is a link into a Hugging Face hub
            cache (``blobs/<sha256>``), and do not read its hundreds of gigabytes again.
        progress: called with the number of bytes done since its last call, one call at a time.
    """
    lock = Lock()

    def advance(count: int) -> None:
        if progress is not None:
            with lock:
                progress(count)

    def digest(path: Path) -> str:
        try:
            if trust_hub_cache and (name := _hub_cache_name(path)):
                advance(path.stat().st_size)
                return name
            sha256 = hashlib.sha256()
            with path.open("rb", buffering=0) as file:
                while chunk := file.read(_CHUNK):
                    sha256.update(chunk)
                    advance(len(chunk))
            return sha256.hexdigest()
        except OSError as problem:
            raise error(f"{path}: cannot be read ({problem.strerror})") from None

    ordered = list(paths)
    with ThreadPoolExecutor(max_workers=_THREADS) as pool:
        return dict(zip(ordered, pool.map(digest, ordered), strict=True))


def _hub_cache_name(path: Path) -> str | None:
    blob = path.resolve()
    is_blob = path.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    return blob.name if is_blob else None
