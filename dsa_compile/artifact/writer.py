"""Writing an artifact: all of it or nothing."""

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from dsa_compile.artifact.atomic_directory import AtomicDirectory
from dsa_compile.artifact.manifest import MANIFEST, Manifest
from dsa_compile.artifact.paths import is_plain
from dsa_compile.artifact.records import TIMINGS, FileRecord, RegionRecord, WeightFile
from dsa_compile.artifact.tokenizer_files import TOKENIZER_FILES, read_tokenizer_file
from dsa_compile.common.strict_json import dump_json
from dsa_compile.errors import ArtifactError
from dsa_compile.ir.graph_json import region_to_json
from dsa_compile.ir.naming import with_readable_names
from dsa_compile.ir.printer import region_to_python
from dsa_compile.ir.region import Region
from dsa_compile.weights.pack import PackedFile

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class ArtifactWriter:
    """Collects an artifact and puts it into place at :meth:`commit`.

    ::

        with ArtifactWriter(out, force=False) as writer:
            records = [writer.add_region(region) for region in regions]
            writer.add_json("weights/plan.json", plan)
            writer.commit(Manifest.build(...))

    Leaving the block in any other way than after a commit removes everything written. Paths are
    relative to the artifact, with ``/`` between parts.

    Args:
        out: where the artifact will be; its parent must exist.
        force: replace an artifact or an empty directory that is there; nothing else ever is.
    """

    def __init__(self, out: Path, force: bool = False) -> None:
        self.out = Path(os.path.abspath(out))
        self.force = force
        self._hashed: dict[str, FileRecord] = {}
        self._committed = False

    def __enter__(self) -> "ArtifactWriter":
        self._staging = AtomicDirectory(self.out, self.force)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._staging.close()
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise self._failed("the artifact", error) from error
        assert error is not None or self._committed, "left without commit"

    def add_text(self, path: str, text: str) -> None:
        """Write a UTF-8 file; the lines end in ``\\n`` on every system."""
        with self._writing(path) as target:
            target.write_bytes(text.encode())

    def add_json(self, path: str, data: Any) -> None:
        """Write a JSON file of plain data."""
        self.add_text(path, dump_json(data))

    def add_dir(self, path: str) -> Path:
        """Make a directory if there is none, and return where it is for now, to be filled."""
        with self._writing(path) as target:
            target.mkdir(exist_ok=True)
        return target

    def add_packed(self, files: Iterable[PackedFile]) -> tuple[WeightFile, ...]:
        """Take over files written to ``weights/``; their contents are not hashed again."""
        folder = self._staging.path / "weights"
        records = tuple(WeightFile.of(folder, file.name, file.sha256) for file in files)
        for record in records:
            path = f"weights/{record.name}"
            self._hashed[path] = FileRecord(path, record.size, record.sha256)
        return records

    def add_region(self, region: Region) -> RegionRecord:
        """Write a region's graph, as JSON with one node a line and as Python to read.

        Its nodes get readable names, the same in both files.
        """
        region = with_readable_names(region)
        record = RegionRecord(region.name, f"graphs/{region.name}.json", f"graphs/{region.name}.py")
        self.add_text(record.graph, _graph_text(region_to_json(region)))
        self.add_text(record.source, region_to_python(region))
        return record

    def add_stage(
        self, path: str, regions: Iterable[dict[str, Any]], sites: Iterable[dict[str, Any]]
    ) -> None:
        """Write the graphs after a pass and its rewrites, one node or rewrite a line.

        Args:
            path: a new file.
            regions: the JSON form of the regions that changed.
            sites: the fields of :class:`~dsa_compile.ir.site.Site`.
        """
        graphs = ",\n".join(_graph_text(data).rstrip() for data in regions)
        rewrites = ",\n".join(map(_one_line, sites))
        self.add_text(path, f'{{"regions": [\n{graphs}\n], "sites": [\n{rewrites}\n]}}\n')

    def add_tokenizer(self, model_dir: Path) -> tuple[str, ...]:
        """Copy those of :data:`TOKENIZER_FILES` that the model has; returns their new paths.

        Raises:
            ConfigError: one is not what its name says, or a link that leads elsewhere.
        """
        present = [name for name in TOKENIZER_FILES if os.path.lexists(model_dir / name)]
        for name in present:
            path = f"tokenizer/{name}"
            data = read_tokenizer_file(model_dir, name)
            with self._writing(path) as target:
                target.write_bytes(data)
        return tuple(f"tokenizer/{name}" for name in present)

    def add_timings(self, seconds: Mapping[str, float]) -> None:
        """Write how long each pass took, beside what the digest is of."""
        self.add_json(TIMINGS, {name: round(value, 6) for name, value in seconds.items()})

    def commit(self, manifest: Manifest) -> Manifest:
        """Hash every file, write the manifest, flush to disk, and rename into place.

        Returns:
            The manifest as written, with its list of files.

        Raises:
            ArtifactError: the disk is full, or ``out`` exists by now and may not be replaced.
        """
        root = self._staging.path
        with self._guarded("the artifact"):
            paths = sorted(
                path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()
            )
            sealed = manifest.sealed(tuple(self._record(p) for p in paths if p != TIMINGS))
        problems = list(sealed.problems())
        assert not problems, problems
        self.add_json(MANIFEST, sealed.to_json())
        with self._guarded("the artifact"):
            self._staging.publish()
        self._committed = True
        return sealed

    def _record(self, path: str) -> FileRecord:
        if path in self._hashed:
            return self._hashed[path]
        with (self._staging.path / path).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileRecord(path, file.tell(), digest)

    @contextmanager
    def _writing(self, path: str) -> Iterator[Path]:
        assert is_plain(path), path
        target = self._staging.path / path
        assert not target.is_file(), f"{path} is written twice"
        with self._guarded(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            yield target

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: OSError) -> ArtifactError:
        reason = error.strerror or str(error)
        return ArtifactError(
            f"{self.out}: cannot write {what} ({reason}); nothing was changed there"
        )


def _one_line(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _graph_text(data: dict[str, Any]) -> str:
    nodes = ",\n".join(map(_one_line, data["nodes"]))
    head = f'"name": {_one_line(data["name"])}, "outputs": {_one_line(data["outputs"])}'
    return f'{{{head}, "nodes": [\n{nodes}\n]}}\n'
