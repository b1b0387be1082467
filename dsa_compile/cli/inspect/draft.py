"""``dsa-inspect ARTIFACT draft --prompt TEXT``: drafts along an answer, and which were right."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dsa_compile.cli.common import printable
from dsa_compile.cli.inspect.output import console, print_json, styled, table
from dsa_compile.cli.inspect.verify import token_ids
from dsa_compile.cli.tables import show
from dsa_compile.errors import UserError

if TYPE_CHECKING:
    from dsa_compile.measure.eval.draft_trace import DraftTrace, TracedToken

_DESCRIPTION = """\
Continue a prompt greedily with drafts, and show for each token of the answer what was drafted for
it, whether that was right, and how clearly the model preferred its token: the margin is the logit
of the token above that of the draft, or, where the draft was right or there was none, above that
of the likeliest other token. A wrong draft beside a margin near zero is a close call; many wrong
ones beside large margins mean that drafting sees a wrong state, token, position or cache row,
which dsa-eval --only mtp tests.
"""
_EPILOG = """\
examples:
  dsa-inspect artifact/ draft --prompt "import os" --max-tokens 40
  dsa-inspect artifact/ draft --prompt-ids "1 2 3" --num-speculative-tokens 2 --json
  dsa-inspect artifact/ draft --prompt "import os" --draft ngram
"""
_LETTERS = 10


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "draft",
        help="drafts along an answer, and which of them were right",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--prompt", metavar="TEXT", help="what to continue")
    which.add_argument("--prompt-ids", metavar="IDS", help='the same as token ids, "1 2 3"')
    parser.add_argument(
        "--max-tokens", type=int, default=32, metavar="N", help="most tokens of the answer (32)"
    )
    parser.add_argument(
        "--draft",
        choices=("mtp", "ngram"),
        default="mtp",
        help="with the artifact's draft plans (the default), or by prompt look-up",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="tokens drafted in a step, 1 to 4 (default: as compiled; 3 with ngram)",
    )
    parser.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="the model's weights, if they moved"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the answer and print it."""
    if args.max_tokens < 2:
        raise UserError(
            f"--max-tokens {args.max_tokens}: give 2 or more; nothing is drafted for the first one"
        )
    prompt = args.prompt
    if prompt is None:
        prompt = token_ids("--prompt-ids", args.prompt_ids)
    from dsa_compile.measure.eval.draft_trace import trace_drafts

    trace = trace_drafts(
        args.artifact,
        prompt,
        args.max_tokens,
        draft=args.draft,
        num_speculative_tokens=args.num_speculative_tokens,
        model_dir=args.model_dir,
    )
    if args.json:
        print_json(_as_json(trace))
        return 0
    out = console()
    _verdict(out, trace)
    _by_depth(out, trace)
    _by_token(out, trace)
    return 0


def _as_json(trace: "DraftTrace") -> dict[str, Any]:
    tokens = [
        {
            **asdict(token),
            "text": trace.texts.get(token.token),
            "draft_text": None if token.draft is None else trace.texts.get(token.draft),
        }
        for token in trace.tokens
    ]
    return {
        "draft": trace.method,
        "num_speculative_tokens": trace.num_drafts,
        "accepted_length": trace.accepted_length,
        "drafted": trace.drafted,
        "accepted": trace.accepted,
        "steps": trace.steps,
        "tokens": tokens,
    }


def _verdict(out: Console, trace: "DraftTrace") -> None:
    many = f"{trace.num_drafts} draft{'s' * (trace.num_drafts != 1)}"
    answer = f"{len(trace.tokens)} tokens in {trace.steps} steps"
    if not trace.drafted:
        out.print(styled("nothing was drafted", "bold"), f" {answer}, {trace.method}")
        return
    verdict = f"{trace.accepted_length:.2f} tokens a step that checks up to {many} ({trace.method})"
    out.print(styled(verdict, "bold"))
    out.print(f"{answer}, the prompt's included")


def _by_depth(out: Console, trace: "DraftTrace") -> None:
    if not trace.drafted:
        return
    numbers = ("depth", "drafted", "right", "share")
    shown = table(*numbers, right=numbers)
    pairs = zip(trace.drafted, trace.accepted, strict=True)
    for depth, (drafted, right) in enumerate(pairs, start=1):
        shown.add_row(str(depth), str(drafted), str(right), f"{right / drafted:.0%}")
    out.print()
    show(out, shown)


def _by_token(out: Console, trace: "DraftTrace") -> None:
    """A line a token; a step has its number where it begins."""
    numbers = ("position", "step", "depth", "margin")
    shown = table("position", "step", "depth", "token", "draft", "", "margin", right=numbers)
    before = -1
    for token in trace.tokens:
        shown.add_row(*_cells(trace, token, new=token.step != before), style=_style(token))
        before = token.step
    out.print()
    show(out, shown)
    out.print(
        styled("margin: of the token's logit, over a wrong draft's or the next best's", "dim")
    )


def _cells(trace: "DraftTrace", token: "TracedToken", new: bool) -> list[str]:
    wrong = token.draft is not None and not token.accepted
    return [
        str(token.position),
        str(token.step) if new else "",
        str(token.depth or ""),
        _named(trace, token.token),
        _named(trace, token.draft) if wrong and token.draft is not None else "",
        "wrong" if wrong else "right" if token.accepted else "",
        f"{token.margin:.2f}",
    ]


def _style(token: "TracedToken") -> str:
    if token.draft is None:
        return "dim"
    return "green" if token.accepted else "yellow"


def _named(trace: "DraftTrace", token: int) -> str:
    """``205 "import"``, its text cut to a few letters; the id alone without a tokenizer."""
    text = trace.texts.get(token)
    if text is None:
        return str(token)
    quoted = printable(json.dumps(text, ensure_ascii=False)[1:-1])
    if len(quoted) > _LETTERS:
        quoted = quoted[: _LETTERS - 1] + "…"
    return f'{token} "{quoted}"'
