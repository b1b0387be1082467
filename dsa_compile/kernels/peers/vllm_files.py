"""Single files of vLLM, and its libraries, without importing the engine and what it depends on."""

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch


@functools.cache
def folder() -> Path:
    """The package's folder; it may be a part of vLLM that was unpacked on the path.

    Raises:
        ModuleNotFoundError: there is none.
    """
    spec = importlib.util.find_spec("vllm")
    for place in spec.submodule_search_locations or () if spec else ():
        return Path(place)
    raise ModuleNotFoundError("vllm is not installed")


@functools.cache
def library(name: str) -> Any:
    """The namespace ``torch.ops.NAME`` with the operators of a stable-ABI library.

    ``$VLLM_C_LIBRARY`` may name the file of ``_C``; it is loaded instead of the package's.

    Args:
        name: ``"_C"`` or ``"_moe_C"``.

    Raises:
        ModuleNotFoundError: vLLM is not installed, or has no such library, or it does not load.
    """
    named = os.environ.get("VLLM_C_LIBRARY") if name == "_C" else None
    for found in [named] if named else folder().glob(f"{name}_stable_libtorch*.so"):
        try:
            torch.ops.load_library(str(found))
        except OSError as error:
            raise ModuleNotFoundError(f"vllm's library does not load: {error}") from error
        return getattr(torch.ops, name)
    raise ModuleNotFoundError(f"vllm has no {name}_stable_libtorch library")


def load(module: str, real: Sequence[str], given: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    """Run a module of vLLM by itself.

    Where it imports other modules of vLLM, these have the names in ``given``; every further name is
    a class that serves in annotations and raises RuntimeError when it is called. ``sys.modules`` is
    afterwards as it was before, with or without a vLLM.

    Args:
        module: full name, such as ``"vllm.utils.math_utils"``.
        real: full names of modules that run from vLLM's files, too.
        given: full name of another module → the names in it.

    Raises:
        ModuleNotFoundError: vLLM is not installed, or has no such file.
    """
    with _only(_Finder(folder(), {module, *real}, given)):
        return importlib.import_module(module)


@contextmanager
def _only(finder: "_Finder") -> Iterator[None]:
    def ours() -> dict[str, ModuleType]:
        return {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm"}

    before = ours()
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


class _Finder(MetaPathFinder):
    """Answers for all of vLLM: files for some modules, :class:`_Stub` for the others."""

    def __init__(self, root: Path, real: set[str], given: Mapping[str, Mapping[str, Any]]) -> None:
        self._root, self._real, self._given = root, real, given

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.partition(".")
        if top != "vllm":
            return None
        if fullname not in self._real:
            return ModuleSpec(fullname, _StubLoader(self._given), is_package=True)
        file = self._root / (rest.replace(".", "/") + ".py")
        if not file.is_file():
            raise ModuleNotFoundError(f"vllm has no {file.name} at {rest}")
        return importlib.util.spec_from_file_location(fullname, file)


class _StubLoader(Loader):
    def __init__(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        self._given = given

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._given.get(module.__name__, {}))


class _Stub(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(cls: type, *args: object, **options: object) -> NoReturn:
            raise RuntimeError(f"{self.__name__}.{name} was called, which is not loaded")

        made = type(name, (), {"__module__": self.__name__, "__new__": refuse})
        setattr(self, name, made)
        return made
