"""Lines of the reference model, from the installed packages; nothing of them is imported."""

import importlib.util
from functools import cache
from importlib import metadata
from pathlib import Path

from dsa_compile.artifact.paths import is_plain, resolve_inside
from dsa_compile.version import __version__


class Sources:
    """Reads lines that nodes come from, where the package installed is the one compiled with.

    Args:
        versions: by package, those that the artifact was compiled with.
    """

    def __init__(self, versions: dict[str, str]) -> None:
        self._versions = versions

    def line(self, source: str) -> str | None:
        """The text of a line, stripped; None if that version of the file is not installed.

        A record is not trusted: only Python files inside the installed package are read.

        Args:
            source: ``transformers/models/…/modeling_….py:104``.
        """
        path, _, number = source.rpartition(":")
        package = path.partition("/")[0]
        if package not in self._versions or _installed(package) != self._versions[package]:
            return None
        lines = _lines(path)
        index = int(number) - 1 if number.isdecimal() else -1
        return lines[index].strip() if 0 <= index < len(lines) else None


@cache
def _installed(package: str) -> str | None:
    if package == "dsa_compile":
        return __version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _lines(path: str) -> list[str]:
    package, _, rest = path.partition("/")
    if not is_plain(rest) or not rest.endswith(".py"):
        return []
    found = importlib.util.find_spec(package)
    for folder in (found and found.submodule_search_locations) or ():
        if file := resolve_inside(Path(folder), rest):
            return file.read_text(encoding="utf-8", errors="replace").splitlines()
    return []
