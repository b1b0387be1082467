"""Artifacts compiled once into the user's cache, for commands that take a model in their place."""

import fcntl
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from dsa_compile.artifact.manifest import open_manifest
from dsa_compile.artifact.records import Producer
from dsa_compile.common import hub
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.facts.config import CompileConfig
from dsa_compile.kernels.cuda.compiler import cache_dir
from dsa_compile.lowering.compile_model import compile_model, decided
from dsa_compile.lowering.compile_result import Progress
from dsa_compile.passes.facts import GROUP


def cached_artifact(
    model: str,
    options: CompileConfig,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """The artifact of a model in the cache, compiled if it is not there yet.

    It is found again while the model's files, the options, this package, torch, transformers and
    the passes of installed packages are what they were. Processes that want the same artifact
    compile it once: the others wait.

    Args:
        model: a directory, or ``owner/name`` on the Hub.
        options: of the compilation.
        revision: of a model on the Hub.
        progress: receives phases, passes and bytes, if it is compiled.

    Raises:
        UserError: see :func:`~dsa_compile.lowering.compile_model.compile_model`; or the cache
            cannot be written.
    """
    options = decided(model, options, revision)
    if hub.is_hub_id(model):
        found = hub.find(model, revision)
        if options.weights != "none":
            found.fetch_weights(options.layers)
        label, files = model.replace("/", "--"), [str(found.path)]  # whose name is the commit
    else:
        label, files = Path(model).resolve().name, list(_stamps(Path(model).resolve()))
    out = artifacts_dir() / f"{label}-{_key(options, files)[:16]}"
    try:
        out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(out.with_name(f".{out.name}.lock")):
            try:
                open_manifest(out)
            except ArtifactError:
                compile_model(model, out, options, force=True, revision=revision, progress=progress)
    except OSError as error:
        raise UserError(
            f"{out}: cannot be written ({error.strerror}); set XDG_CACHE_HOME to another place"
        ) from None
    return out


def artifacts_dir() -> Path:
    """The folder of the cache with artifacts."""
    kernels = cache_dir()
    return (kernels if "DSA_COMPILE_CACHE" in os.environ else kernels.parent) / "artifacts"


def _key(options: CompileConfig, files: Sequence[str]) -> str:
    """Digest of all that an artifact depends on."""
    profile = [] if options.profile is None else list(_stamps(Path(options.profile)))
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name)
    modules = [f"dsa_compile{room}" for room in ("", ".passes", ".lowering")]  # beside it, or in it
    modules += [point.module.partition(".")[0] for point in points]
    sources = [stamp for module in modules for stamp in _stamps(_home(module))]
    added = [(point.value, point.dist and point.dist.version) for point in points]
    facts = (asdict(Producer.current()), added, sources, options.to_json(), profile, files)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _home(module: str) -> Path:
    """The folder of a package, or the file of another module."""
    spec = importlib.util.find_spec(module)
    origin = Path(spec.origin if spec and spec.origin else os.devnull)
    return origin.parent if origin.name == "__init__.py" else origin


def _stamps(path: Path) -> Iterator[str]:
    """Name, size and time of a file, or of all below a folder but what Python compiled."""
    files = (Path(at, name) for at, _, names in os.walk(path) for name in names)
    for file in sorted(files) if path.is_dir() else [path]:
        if file.suffix != ".pyc":
            found = file.stat()
            yield f"{file} {found.st_size} {found.st_mtime_ns}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock on a file, made if need be; the system gives it up with the process."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
