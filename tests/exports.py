"""Exports kept from one test to the next: most tests compile one of a few small models.

Tracing takes longer than all passes together, and what it gives does not depend on what is done
with it: whoever asks gets a copy. Commands that tests start as processes export for themselves.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsa_compile.facts.config import CompileConfig
from dsa_compile.frontend import build
from dsa_compile.ir.program import Program

_KEPT = 16  # programs, a few MB each
_exports: OrderedDict[object, Program] = OrderedDict()


def keep_exports() -> None:
    """Make :func:`dsa_compile.frontend.build.build_program` remember; for one test process.

    To be called before any module takes the function from there; called again it changes nothing,
    since faults are planted in the one function that all modules have.
    """
    if build.build_program.__module__ != __name__:
        build.build_program = _keeping(build.build_program)


def forget_exports() -> None:
    """Let every model be exported anew, by a frontend that is another now."""
    _exports.clear()


def _keeping(
    export: Callable[..., Program],
) -> Callable[..., Program]:
    kept = _exports

    def build_program(
        model_dir: Path,
        config: CompileConfig,
        recorded: Mapping[str, Any] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Program:
        if recorded is not None or sizes is not None:
            return export(model_dir, config, recorded, sizes)
        try:
            text = (Path(model_dir) / "config.json").read_bytes()
        except OSError:
            return export(model_dir, config)
        key = (text, config.dtype, config.layers, config.draft)
        if key in kept:
            kept.move_to_end(key)
        else:
            kept[key] = export(model_dir, config)
            while len(kept) > _KEPT:
                kept.popitem(last=False)
        program = kept[key].fork(kept[key].config)
        program.config = config  # no pass has run, so nothing of the options is in the graphs
        return program

    return build_program
