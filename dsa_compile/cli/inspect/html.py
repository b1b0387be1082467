"""``dsa-inspect ARTIFACT html``: the passes of an artifact as one HTML file."""

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from dsa_compile.cli.inspect.output import print_json
from dsa_compile.common.regular_files import write_whole
from dsa_compile.errors import ArtifactError, UserError
from dsa_compile.inspect.html.document import document
from dsa_compile.inspect.html.overlays import numerics, times
from dsa_compile.inspect.html.payload import payload
from dsa_compile.inspect.measured import VERIFY
from dsa_compile.inspect.store import Store

_DESCRIPTION = """\
Write a report of every pass as one HTML file: an overview with the purpose of each pass, each pass
side by side with rewrites to select, the graphs drawn with streams as lanes, search, and links to
any place in it. It needs no server and no network.
"""


def register(commands: Any) -> None:
    """Add the command to ``dsa-inspect``."""
    parser = commands.add_parser(
        "html",
        help="write a report of every pass, to open in a browser",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--verify",
        type=Path,
        default=argparse.SUPPRESS,  # the same option may stand before the command
        metavar="FILE",
        help=f"errors of rewrites (default: ARTIFACT/{VERIFY}, if dsa-inspect verify has left it)",
    )
    parser.add_argument(
        "--bench",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE",
        help="times: of dsa-bench step --by-op --ablate -o FILE",
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report."""
    store = Store.open(args.artifact)
    try:
        data = payload(store)
    except UserError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        problem = f"a damaged record of a pass ({error!r}); recompile"
        raise ArtifactError(f"{store.path}: {problem}") from None
    left = store.path / VERIFY
    if args.verify is not None or left.is_file():
        data["numerics"] = numerics(args.verify or left)
    if args.bench is not None:
        data["times"] = times(store, args.bench)
    out: Path = args.output
    if not out.parent.is_dir():
        raise UserError(f"{out}: {out.parent} is not a directory; create it first")
    text = document(data)
    size = len(text.encode())
    try:
        if out.exists() and not out.is_file():  # a pipe or a device
            out.write_text(text, encoding="utf-8")
        else:
            write_whole(out.resolve(), text)  # where a link leads
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror})") from None
    if args.json:
        print_json({"file": str(out), "bytes": size})
    else:
        print(f"{out}: {len(store.stages) - 1} passes, {size / 1e6:.1f} MB")
    if args.open and not webbrowser.open(out.resolve().as_uri()):
        raise UserError(f"{out}: written, but no browser was found; open the file yourself")
    return 0
