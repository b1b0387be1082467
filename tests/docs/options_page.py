"""docs/options.md: every option once, written from the fields that say it."""

import argparse
from collections.abc import Iterator

from dsa_compile.common.options import Named, options_of
from dsa_compile.errors import NAMES
from dsa_compile.facts.config import CompileConfig
from dsa_compile.facts.layout import Layout
from dsa_compile.measure.eval.options import Options
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.requests.sampling_params import SamplingParams
from dsa_compile.server.settings import Settings
from tests.docs.commands import SCRIPTS, parser

PAGE = "docs/options.md"
_HEAD = """\
# Options

Every option, in the one spelling that Python (`max_num_seqs=8`), the commands (`--max-num-seqs 8`)
and `dsa-serve --config` (`max-num-seqs: 8`) share. Further flags stand in brackets; what is not a
flag of any command is for Python alone. Switches have an opposite: `--no-enforce-eager`. `4K` is
4,096 and `4k` 4,000. Former names are taken for one more version.

<!-- Written by python -m tests.docs.update docs/options.md from the fields of the options. -->
"""
_GROUPS = {
    "Of a compilation: `dsa_compile.compile`": CompileConfig,
    "Of ranks: `dsa_compile.facts.layout.Layout`": Layout,
    "Of an engine: `Engine.load`": EngineOptions,
    "Of a request: `SamplingParams`": SamplingParams,
    "Of a server": Settings,
    "Of an evaluation": Options,
}


def page() -> str:
    """The text of the page."""
    taken = {name: set(_taken(parser(name))) for name in SCRIPTS}
    parts = [_HEAD]
    for title, cls in _GROUPS.items():
        rows = []
        for each in options_of(cls):
            commands = [name for name, found in taken.items() if (cls, each.name) in found]
            rows.append(_row(each, commands))
        head = "| option | what it is | default | values | unit | commands | was |\n" + "|---" * 7
        parts.append(f"## {title}\n\n{head}|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _taken(made: argparse.ArgumentParser) -> Iterator[tuple[type, str]]:
    """The options that a parser takes, each with its class."""
    for action in made._actions:
        if hasattr(action, "option"):
            yield action.option
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _taken(sub)


def _row(each: Named, commands: list[str]) -> str:
    said = each.said
    further = [f"--{name.replace('_', '-')}" for name in (said.flag, *said.also) if name]
    name = f"`{each.name}`" + (f" (`{'`, `'.join(further)}`)" if further else "")
    values = ", ".join(f"`{choice}`" for choice in said.choices) or said.bounds
    if each.kind is bool:
        values = "on, off"
    opposite = (name.startswith("no_") for name in said.was)
    names = [f"`{name.removeprefix('no_')}`" for name in said.was]
    was = ", ".join(n + ", the opposite" * no for n, no in zip(names, opposite, strict=True))
    words = (said.help, each.shown_default(), values, said.unit, ", ".join(commands), was)
    texts = (text.format_map(NAMES).replace("|", "\\|").replace("<", "&lt;") for text in words)
    return f"| {name} | {' | '.join(texts)} |"
