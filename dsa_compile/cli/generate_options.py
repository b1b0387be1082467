"""The options of ``dsa-generate``."""

import argparse
from pathlib import Path

from dsa_compile.cli.common import Parser
from dsa_compile.cli.flags import add_options
from dsa_compile.cli.models import ABOUT, add_compile_options
from dsa_compile.runtime.engine_options import EngineOptions
from dsa_compile.runtime.requests.sampling_params import SamplingParams

_DESCRIPTION = f"""\
Continue one or more prompts.

{ABOUT}
Prompts are texts when the model came with a
tokenizer, and token ids always. Several prompts run together as one batch.
"""
_EXAMPLES = """\
examples:
  dsa-generate artifact/ --prompt "Once upon a time" --max-tokens 50
  dsa-generate artifact/ --prompt-ids "1 2 3" "4 5" --temperature 0
  dsa-generate artifact/ --prompt-file prompts.txt --json > results.jsonl
  dsa-generate artifact/ --chat --system "Be brief." --prompt "What is RoPE?"
  dsa-generate artifact/ --input questions.jsonl --output answers.jsonl
"""
# Options of requests that make no difference to what is printed, or cannot be said in a flag.
_UNSAID = (
    "logit_bias", "grammar", "prompt_logprobs", "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
_ENDING = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``dsa-generate``."""
    parser = Parser(
        prog="dsa-generate",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s MODEL (--prompt TEXT | --prompt-ids IDS | --prompt-file FILE | "
        "--input FILE --output FILE) [options]",
    )
    parser.add_argument(
        "artifact", metavar="MODEL",
        help="a directory, or owner/name on the Hub; or what dsa-compile wrote",
    )  # fmt: skip
    where = parser.add_argument_group("prompts (one of)").add_mutually_exclusive_group(
        required=True
    )
    where.add_argument(
        "--prompt",
        nargs="+",
        action="extend",
        metavar="TEXT",
        help="each TEXT is one prompt; - is all of standard input",
    )
    where.add_argument(
        "--prompt-ids",
        nargs="+",
        action="extend",
        metavar="IDS",
        help='each quoted list of token ids, such as "1 2 3", is one prompt',
    )
    where.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="each line that is not empty is one text prompt; - is standard input",
    )
    where.add_argument(
        "--input",
        metavar="FILE",
        type=Path,
        help='each line is a JSON object with "prompt" (a text or token ids) or "messages", and '
        'perhaps "id" and options such as "max_tokens"',
    )
    more = parser.add_argument_group("more on prompts")
    more.add_argument(
        "--separator",
        metavar="LINE",
        help="with --prompt-file: a line such as --separator=--- stands between prompts, which may "
        "have many lines",
    )
    more.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="with --input: a JSON object is appended for each line as it is finished; those that "
        "are there already are not run again",
    )
    more.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a user's message, encoded in the model's chat format",
    )
    more.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    more.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="with --chat: let the answer begin with reasoning (default: as the model does)",
    )

    own = "the model's own defaults come before those said here"
    sampling = parser.add_argument_group("choosing tokens", own)
    add_options(sampling, SamplingParams, leave_out=(*_UNSAID, *_ENDING, "logprobs"))
    add_options(parser.add_argument_group("when to end", own), SamplingParams, only=_ENDING)

    output = parser.add_argument_group("output")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    form.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print tokens as they come (default: if standard output is a terminal)",
    )
    add_options(output, SamplingParams, only=("logprobs",))
    output.add_argument(
        "--verbose",
        action=argparse.BooleanOptionalAction,
        help="say on standard error what loading does, and how long it takes (default: if it is a "
        "terminal)",
    )
    engine = parser.add_argument_group("engine")
    add_options(engine, EngineOptions, leave_out=("skip_tokenizer_init",))
    add_compile_options(parser)
    return parser
