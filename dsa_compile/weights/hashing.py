"""Content hashes of weight files, several files at a time."""

import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Lock

from dsa_compile.common.regular_files import open_regular
from dsa_compile.errors import UserError

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 8 << 20
# Enough to keep a disk busy; hashlib releases the interpreter lock.
_THREADS = 4


class Hashes:
    """Hex SHA-256 of the contents of files, being made in the background.

    Args:
        paths: the files.
        error: what to raise for a file that cannot be read.
        trust_hub_cache: take the hash from the name where a file is a link into a Hugging Face hub
            cache (``blobs/<sha256>``), and do not read its hundreds of gigabytes again.
        progress: called with the number of bytes done since its last call, one call at a time.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        error: type[UserError],
        *,
        trust_hub_cache: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._error, self._trusts, self._progress = error, trust_hub_cache, progress
        self._lock, self._stopped = Lock(), Event()
        self._pool = ThreadPoolExecutor(max_workers=_THREADS)
        self._found = {path: self._pool.submit(self._digest, path) for path in paths}
        self._pool.shutdown(wait=False)

    def result(self) -> dict[Path, str]:
        """Wait for all of them.

        Raises:
            UserError: of the kind ``error``.
        """
        try:
            return {path: future.result() for path, future in self._found.items()}
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stop: the result is no longer wanted."""
        self._stopped.set()

    def _digest(self, path: Path) -> str:
        try:
            if self._trusts and (blob := hub_blob(path)):
                self._advance(path.stat().st_size)
                return blob.name
            sha256 = hashlib.sha256()
            with open_regular(path) as file:
                while not self._stopped.is_set() and (chunk := file.read(_CHUNK)):
                    sha256.update(chunk)
                    self._advance(len(chunk))
            return sha256.hexdigest()
        except OSError as problem:
            raise self._error(f"{path}: cannot be read ({problem.strerror})") from None

    def _advance(self, count: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(count)


def hash_files(
    paths: Iterable[Path],
    error: type[UserError],
    *,
    trust_hub_cache: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[Path, str]:
    """Hex SHA-256 of each file's content; see :class:`Hashes`."""
    return Hashes(paths, error, trust_hub_cache=trust_hub_cache, progress=progress).result()


def hub_blob(path: Path) -> Path | None:
    """The file in a Hugging Face hub cache that a link leads to, called by its SHA-256; or None."""
    blob = path.resolve()
    is_blob = path.is_symlink() and blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name)
    return blob if is_blob else None
