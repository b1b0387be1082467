"""``dsa-chat``: a conversation in the terminal with a server of OpenAI's API."""

import argparse
import http.client
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from dsa_compile.cli.common import Parser, guarded
from dsa_compile.errors import UserError

PROGRAM = "dsa-chat"
_HELP = """\
/new     begin anew
/help    show this
Ctrl-C   stop the answer
Ctrl-D   end"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        0 at the end of the input, 2 for a user's error (no server there, an error of the server).
    """
    return guarded(PROGRAM, lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        description="Talk to a model behind dsa-serve, or any server of OpenAI's API. /help tells "
        "what else can be typed.",
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL",
        help="of the server (default http://127.0.0.1:8000)",
    )  # fmt: skip
    parser.add_argument("--model", metavar="NAME", help="one of the server's (default: its first)")
    parser.add_argument(
        "--api-key", default=os.environ.get("DSA_API_KEY"), metavar="KEY",
        help="of the server (default: $DSA_API_KEY)",
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="instructions to begin with")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="randomness of answers")
    parser.add_argument("--thinking", action="store_true", help="have the model reason first")
    return parser


def _run(args: argparse.Namespace) -> int:
    server = _Server(args.url, args.api_key)
    options = {
        "model": args.model,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "chat_template_kwargs": {"thinking": True} if args.thinking else None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    start = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(start)
    if sys.stdin.isatty():
        print(f"{args.model or server.model()} at {args.url}; /help tells what can be typed")
    while (line := _read()) is not None:
        if line == "/new":
            messages = list(start)
        elif line == "/help":
            print(_HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _show(server.chat({"messages": messages, **options}))
            messages.append({"role": "assistant", "content": answer})
    return 0


def _read() -> str | None:
    """A line; None at the end, and empty where Ctrl-C took it back."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print("\n(Ctrl-D ends)")
        return ""


def _show(deltas: Iterator[dict[str, Any]]) -> str:
    """Print an answer as it comes, its reasoning dimmed where a terminal shows that; its text."""
    dims = sys.stdout.isatty()
    answer: list[str] = []
    try:
        for delta in deltas:
            if reasoning := delta.get("reasoning_content"):
                print(f"{_DIM}{reasoning}{_PLAIN}" if dims else reasoning, end="", flush=True)
            if content := delta.get("content"):
                print(content, end="", flush=True)
                answer.append(content)
        print()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" (stopped)")
    return "".join(answer)


class _Server:
    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not an address such as http://127.0.0.1:8000")
        kind = http.client.HTTPSConnection
        self._connect = kind if parts.scheme == "https" else http.client.HTTPConnection
        self._address = parts.netloc.rpartition("@")[2]
        self._root = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def chat(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The deltas of a streamed answer.

        Raises:
            UserError: the server cannot be reached, or answers with an error.
        """
        with self._answer("POST", "/chat/completions", {**body, "stream": True}) as response:
            for text in _data(response):
                if text == "[DONE]":
                    return
                yield from _deltas(text)

    def model(self) -> str:
        """The name of the server's first model; raises UserError as :meth:`chat` does."""
        with self._answer("GET", "/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise UserError(f"{self._address}: the server lists no models") from None

    @contextmanager
    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect(self._address)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._root + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise UserError(_problem(response.read(), response.status))
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{self._address}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _data(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of server-sent events, whose other fields and comments mean nothing here."""
    data: list[str] = []
    for line in chain(lines, [b""]):
        field, _, value = line.decode(errors="replace").rstrip("\r\n").partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
        elif not line.strip() and data:
            yield "\n".join(data)
            data = []


def _deltas(text: str) -> Iterator[dict[str, Any]]:
    try:
        chunk = json.loads(text)
        if "error" in chunk:
            raise UserError(str(chunk["error"]["message"]))
        for choice in chunk.get("choices") or ():
            yield dict(choice.get("delta") or {})
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"the server sent no chunk of a chat: {text!r:.200}") from None


def _problem(body: bytes, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"


if __name__ == "__main__":
    sys.exit(main())
