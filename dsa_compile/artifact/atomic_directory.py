"""Directories that appear whole or not at all.

An artifact is made in a sibling of its final path, ``.{name}.tmp-{pid}-{random}``, and renamed
into place. To replace one, the old is first renamed to ``.{name}.old-{pid}-{random}``. Whatever
kills the process, the final path holds the old artifact, the new one, or nothing; and if nothing,
the next start puts the old one back. Siblings of dead processes are removed at the next start.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from dsa_compile.artifact.manifest import MANIFEST
from dsa_compile.artifact.records import ACCEPTANCE, PRODUCER, TIMINGS
from dsa_compile.common.regular_files import read_regular
from dsa_compile.common.strict_json import load_json
from dsa_compile.errors import ArtifactError


class AtomicDirectory:
    """A directory being filled; locked meanwhile, so that it is not taken for a leftover."""

    def __init__(self, out: Path, force: bool) -> None:
        """Clear leftovers of ``out``, check that it may be written, and make the directory.

        Raises:
            ArtifactError: ``out`` exists and may not be replaced, or its parent is no writable
                directory.
        """
        self.out = out
        self.force = force
        _require_parent(out)
        try:
            _clear_leftovers(out)
            _require_free(out, force)
            self.path = _sibling(out, "tmp")
            self.path.mkdir()
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise ArtifactError(f"{out}: cannot write there ({error.strerror})") from error

    def publish(self) -> None:
        """Flush everything to disk and rename it into place.

        Raises:
            ArtifactError: ``out`` has appeared meanwhile and may not be replaced.
            OSError: the disk's; ``out`` is then as it was before.
        """
        _flush(self.path)
        _require_free(self.out, self.force)
        if not self.out.exists():
            self.path.rename(self.out)
            _sync(self.out.parent)
            return
        old = _sibling(self.out, "old")
        self.out.rename(old)
        try:
            self.path.rename(self.out)
        except BaseException:
            old.rename(self.out)
            raise
        _sync(self.out.parent)
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Remove what was not published and give up the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def check_free(out: Path, force: bool) -> None:
    """Clear leftovers of ``out`` and check, before work is begun, that it may be written.

    Raises:
        ArtifactError: see :class:`AtomicDirectory`.
    """
    _require_parent(out)
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise ArtifactError(f"{out}: cannot write there (Permission denied)")
    try:
        _clear_leftovers(out)
    except OSError as error:
        raise ArtifactError(f"{out}: cannot write there ({error.strerror})") from error
    _require_free(out, force)


def _require_parent(out: Path) -> None:
    if "\0" in str(out):
        raise ArtifactError(f"{str(out)!r:.200} is no path: it holds a null character")
    if not out.parent.is_dir():
        raise ArtifactError(f"{out}: {out.parent} is not a directory; create it first")


def _sibling(out: Path, role: str) -> Path:
    return out.parent / f".{out.name}.{role}-{os.getpid()}-{secrets.token_hex(4)}"


def _require_free(out: Path, force: bool) -> None:
    """Raise unless ``out`` is absent, or may be replaced: an artifact or an empty directory."""
    if not os.path.lexists(out):
        return
    if not force:
        raise ArtifactError(f"{out}: exists already; use --force to replace it, or another path")
    if out.is_symlink() or not out.is_dir():
        raise ArtifactError(f"{out}: is not a directory, and --force replaces artifacts only")
    if not any(out.iterdir()):
        return
    listed = _listed_files(out)
    if listed is None:
        raise ArtifactError(
            f"{out}: holds files but no artifact, and --force replaces artifacts only; "
            "remove it yourself or choose another path"
        )
    for folder, _, names in os.walk(out):
        for name in names:
            path = Path(folder, name).relative_to(out)
            ours = path.as_posix() in listed and path.parts[0] in _FOLDERS
            if not ours and str(path) not in _BESIDE:
                raise ArtifactError(
                    f"{out / path}: not a file of the artifact that --force would replace; move "
                    "it away or choose another path"
                )


# What a manifest lists elsewhere is not ours, whatever it says.
_FOLDERS = ("graphs", "kernels", "passes", "tokenizer", "weights")
# What commands write that the manifest does not list.
_BESIDE = (MANIFEST, TIMINGS, ACCEPTANCE, "verify.json")


def _listed_files(path: Path) -> frozenset[str] | None:
    """The files of an artifact of ours, of any version and even if damaged; None if it is none."""
    try:
        manifest = load_json(read_regular(path / MANIFEST), MANIFEST)
    except (OSError, ArtifactError):
        return None
    producer = manifest.get("producer") if isinstance(manifest, dict) else None
    if not isinstance(producer, dict) or producer.get("name") != PRODUCER:
        return None
    files = manifest.get("files")
    records = [file for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return frozenset(str(record.get("path")) for record in records)


def _clear_leftovers(out: Path) -> None:
    """Remove, or where nothing is at ``out`` put back, what dead processes left beside it."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(tmp|old)-([0-9]{{1,10}})-[0-9a-f]{{8}}")
    for path in out.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(FileNotFoundError):  # another process clears them, too
            if not is_abandoned(path, int(match[2])):
                continue
            if match[1] == "old" and not os.path.lexists(out):
                path.rename(out)
            else:
                shutil.rmtree(path, ignore_errors=True)


def is_abandoned(folder: Path, pid: int) -> bool:
    """Whether a folder is this user's, and of a process that is gone and held a lock on it.

    Raises:
        OSError: it cannot be looked at.
    """
    others = folder.stat().st_uid != os.geteuid()  # whoever may write beside it may plant one
    return not (others or _is_alive(pid) or _is_locked(folder))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_locked(path: Path) -> bool:
    # Numbers of processes in other containers mean nothing here; their locks do.
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _flush(root: Path) -> None:
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
