"""Faults of the second catalogue: what is wrong, where it stands, and what a tool should say.

A fault is a text of one file of the package and what stands there instead. Nothing of the package
is imported to list or to plant one.
"""

import gc
import shutil
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FOLDERS = ("dsa_compile", "passes", "lowering", "runtime")
KINDS = ("pass", "ir", "weight", "stream", "kernel", "runtime")


class NotThereError(Exception):
    """The text to replace is not in its file exactly once."""


@dataclass(frozen=True)
class Fault:
    """One fault, or a control: a change that is right.

    Attributes:
        id: unique among faults.
        about: what is wrong, one line.
        file: of the package, relative to the root, such as ``passes/pack_swiglu.py``.
        old: the text that is replaced; stands in the file once.
        new: what takes its place.
        kind: where the fault is to be found: ``pass``, ``ir`` (a helper of all passes), ``weight``
            (how a weight is made), ``stream``, ``kernel`` (an op's implementation), ``runtime``.
        recipe: to compile with.
        model: a name of :mod:`tests.planted_bugs.second.models`.
        target: to compile for; ``sm_90a`` is run with the references.
        culprit: what to name: the pass, the op, the runtime's module, or the weight's key.
        site: number of the one site that is wrong, where there is only one.
        layers: the only layers that are wrong.
        hidden_by: an option of the engine that hides a runtime fault, as ``name=value``.
        echo: a public thread about a fault like it, ``owner/repository#number``.
        control: the change is right: nothing may be accused.
        provider: whose kernel is wrong; one of Triton's is run by its interpreter.
        compiles: it shows in what is compiled, though it is in a file that the runtime runs too.
        options: further choices of the compilation, by name: those of ``dsa_compile.compile`` and
            of its layout (``tp``, ``dp``, ``ep``, ``shard_embedding``).
    """

    id: str
    about: str
    file: str
    old: str
    new: str
    kind: str
    culprit: str
    recipe: str = "fp32"
    model: str = "small"
    target: str = "cpu"
    site: int | None = None
    layers: tuple[int, ...] = ()
    hidden_by: str = ""
    echo: str = ""
    control: bool = False
    compiles: bool = False
    provider: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def module(self) -> str:
        """Name of the module that the fault is in."""
        return "dsa_compile." + self.file.removeprefix("dsa_compile/").removesuffix(".py").replace(
            "/", "."
        )

    @property
    def needs_compilation(self) -> bool:
        """Whether the fault can show in what is compiled; others show in a right artifact."""
        return (
            self.compiles
            or self.target != "cpu"
            or not self.file.startswith(("runtime/", "dsa_compile/ops/", "dsa_compile/weights/"))
        )

    def planted(self, text: str) -> str:
        """``text``, the file, with the fault in it."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise NotThereError(f"{self.id}: {text.count(self.old)} times in {self.file}")
        return text.replace(self.old, self.new)

    def plant(self, folder: Path) -> Path:
        """Put the fault into a copy of the package in ``folder``, and any other one out of it."""
        if not folder.exists():
            copy_package(folder)
        marker = folder / "planted"
        if marker.exists():
            last = marker.read_text(encoding="utf-8")
            shutil.copy2(ROOT / last, folder / last)
        marker.write_text(self.file, encoding="utf-8")
        path = folder / self.file
        path.write_text(self.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
        return folder


def compile_options(options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """A fault's options as :func:`dsa_compile.compile` takes them, with pages of 16 rows."""
    made = {"block_size": 16, "records": False, **dict(options)}
    parts = {name: made.pop(name) for name in ("tp", "dp", "ep", "shard_embedding") if name in made}
    if parts:
        from dsa_compile.facts.layout import Layout

        made["layout"] = Layout(**parts)
    return made


def swap_functions(file: Path, module_file: str, planted: str) -> bool:
    """Give the functions of an imported module the code of a planted file.

    Args:
        file: the file as it is.
        module_file: the module's ``__file__``.
        planted: the text with the fault.

    Returns:
        False, with nothing done, if more than the bodies of functions differs.
    """
    before = compile(file.read_text(encoding="utf-8"), module_file, "exec")
    after = compile(planted, module_file, "exec")
    old, new = (dict(_functions(code)) for code in (before, after))
    if old.keys() != new.keys() or _frame(before) != _frame(after):
        return False
    changed = {name for name in old if old[name].co_code != new[name].co_code
               or _frame(old[name]) != _frame(new[name])}  # fmt: skip
    outer = {n for n in changed if not any(n.startswith(f"{o}.<locals>") for o in changed - {n})}
    done = set()
    for found in gc.get_objects():
        if type(found) is types.FunctionType and found.__code__.co_filename == module_file:
            name = found.__code__.co_qualname
            if name in outer:
                found.__code__ = new[name]
                done.add(name)
    return bool(done) and done == outer


def _functions(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant.co_qualname, constant
            yield from _functions(constant)


def _frame(code: types.CodeType) -> tuple[Any, ...]:
    """Code but for that of the functions in it, and for its lines."""
    inner = [c if not isinstance(c, types.CodeType) else c.co_qualname for c in code.co_consts]
    return code.co_code, code.co_names, code.co_freevars, inner


def copy_package(folder: Path) -> None:
    """The package as it is, in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
