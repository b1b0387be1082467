"""The prompts of ``dsa-generate``: from arguments, files and standard input."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.cli.generate_output import Prompt
from dsa_compile.errors import UserError

if TYPE_CHECKING:
    from dsa_compile.runtime import Engine

STDIN = "-"


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that have no meaning beside the others.

    Raises:
        UserError: such as ``--system`` without ``--chat``.
    """
    for name, needs in (("separator", "prompt_file"), ("output", "input"), ("input", "output")):
        if getattr(args, name) is not None and getattr(args, needs) is None:
            raise UserError(f"--{name} needs --{needs.replace('_', '-')}")
    for name in ("system", "thinking"):
        if getattr(args, name) is not None and not args.chat:
            raise UserError(f"--{name} needs --chat")
    if args.chat and args.prompt_ids is not None:
        raise UserError("--chat takes texts; leave out --prompt-ids")
    if args.chat and args.input is not None:
        raise UserError('--input takes conversations as "messages"; leave out --chat')


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts that the arguments name, as given.

    Raises:
        UserError: a file cannot be read or has no prompts, or ids are none.
    """
    if args.prompt_ids is not None:
        return [_token_ids(text) for text in args.prompt_ids]
    if args.prompt is not None:
        if args.prompt.count(STDIN) > 1:
            raise UserError("--prompt - reads all of standard input; give it once")
        return [_read(STDIN, "--prompt") if text == STDIN else text for text in args.prompt]
    lines = _read(args.prompt_file, "--prompt-file").splitlines()
    prompts = _separated(lines, args.separator) if args.separator is not None else lines
    found: list[Prompt] = [prompt for prompt in prompts if prompt.strip()]
    if not found:
        raise UserError(f"--prompt-file {args.prompt_file} has no prompts; write one on each line")
    return found


def engine_prompts(engine: "Engine", prompts: list[Prompt], args: argparse.Namespace) -> list[Any]:
    """The prompts as an engine takes them: conversations of one message with ``--chat``.

    Raises:
        RequestError: the model has no chat format.
    """
    if not args.chat:
        return list(prompts)
    before = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [
        engine.chat_prompt([*before, {"role": "user", "content": text}], thinking=args.thinking)
        for text in prompts
    ]


def _separated(lines: list[str], separator: str) -> list[str]:
    prompts: list[list[str]] = [[]]
    for line in lines:
        if line == separator:
            prompts.append([])
        else:
            prompts[-1].append(line)
    return ["\n".join(prompt) for prompt in prompts]


def _read(file: str, option: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
        return data.decode("utf-8-sig")  # a byte order mark is no part of the text
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read {option} {file}: {reason}") from error


def _token_ids(text: str) -> list[int]:
    try:
        ids = [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise UserError(f'--prompt-ids takes integers such as "1 2 3"; got {text!r}')
    return ids
