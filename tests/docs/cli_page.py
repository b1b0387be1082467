"""docs/cli.md: every option of every command, written from the commands' parsers."""

import argparse
import re
from collections.abc import Iterator

from tests.docs.commands import SCRIPTS, parser

PAGE = "docs/cli.md"
_HEAD = """\
# Command line

Every command prints results on standard output and errors on standard error, one line each: what,
where, how to mend it. Exit status: 0 done, 1 something could not be done or measured, 2 refused,
130 interrupted. Nothing half-written stays behind.

<!-- Written by python -m tests.docs.update docs/cli.md from the commands' parsers. -->
"""


def page() -> str:
    """The text of the page."""
    parts = [_HEAD]
    for name in SCRIPTS:
        parts.append(f"## {name}\n")
        parts.extend(_command(parser(name), name))
    return "\n".join(parts)


def _command(made: argparse.ArgumentParser, name: str) -> Iterator[str]:
    summary = (made.description or "").strip()
    if summary:
        yield _plain(summary) + "\n"
    for group in made._action_groups:
        rows = [_row(made, action) for action in group._group_actions if _is_option(action)]
        if rows:
            title = (group.title or "options").removesuffix(":")
            yield f"| {title} | |\n|---|---|\n" + "\n".join(rows) + "\n"
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for verb, sub in action.choices.items():
                if verb in about:  # an alias has no entry of its own
                    yield f"### {name} {verb}\n"
                    yield from [] if sub.description else [_plain(about[verb]).capitalize() + ".\n"]
                    yield from _command(sub, f"{name} {verb}")


def _is_option(action: argparse.Action) -> bool:
    hidden = action.help == argparse.SUPPRESS
    return not hidden and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def _row(made: argparse.ArgumentParser, action: argparse.Action) -> str:
    metavar = action.metavar or action.dest.upper()
    value = metavar if isinstance(metavar, str) else " ".join(metavar)
    # what --help would say, but with the default filled in at any width
    said = made._get_formatter()._expand_help(action) if action.help else ""
    names = ", ".join(action.option_strings) or value
    shown = names if action.nargs == 0 or not action.option_strings else f"{names} {value}"
    return f"| `{shown}` | {_cell(said)} |".replace("`|`", "`\\|`")


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    """A help text as Markdown: nothing of it is a tag."""
    return re.sub(r"<(?=\w)", "&lt;", text)
