"""``dsa-generate --input FILE --output FILE``: requests as JSON lines, resumable.

A line of the output names the line of the input that it answers, and is written and flushed to disk
when that request is finished. Run again after a crash, a command goes on with what is missing: the
last line of the output is dropped if it was not written to its end.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_compile.errors import RequestError, UserError

if TYPE_CHECKING:
    from dsa_compile.runtime import ChatPrompt, Engine, RequestOutput, SamplingParams

_UNFINISHED = 1024  # requests in the engine at once; the others wait in the file
_CHAT_FIELDS = ("tools", "thinking", "response_format")


@dataclass(frozen=True)
class _Line:
    number: int  # from 1
    digest: str
    content: Mapping[str, Any]


@dataclass(frozen=True)
class BatchResult:
    """Result of a batch.

    Attributes:
        requests: run now.
        resumed: lines that were finished before.
        tokens: generated now.
        errors: of the requests that failed.
    """

    requests: int
    resumed: int
    tokens: int
    errors: tuple[str, ...]


class Batch:
    """Reads and checks both files; nothing is run before.

    Args:
        source: JSON lines, one request each.
        out: JSON lines, appended to.

    Raises:
        UserError: a file cannot be read, a line is no request, or the output is of another input.
    """

    def __init__(self, source: Path, out: Path) -> None:
        self._source, self._out = source, out
        if out.exists() and not out.is_file():  # what is there is read first
            raise UserError(f"{out}: not a regular file")
        self._lines = list(_read_lines(source))
        if not self._lines:
            raise UserError(f"{source}: has no requests; write one JSON object on each line")
        self._done, self._size = _finished(out, {line.number: line.digest for line in self._lines})

    def run(self, engine: "Engine", params: "SamplingParams") -> BatchResult:
        """Run what is not finished; a request that cannot be served is answered with its error.

        Args:
            engine: idle.
            params: where a line names no option.

        Raises:
            UserError: the output cannot be written.
        """
        waiting = iter([line for line in self._lines if line.number not in self._done])
        running: dict[str, tuple[_Line, ChatPrompt | None]] = {}
        tokens, requests, errors = 0, 0, []
        try:
            file = self._out.open("r+b" if self._out.exists() else "xb")
        except OSError as error:
            raise UserError(f"{self._out}: cannot be written ({error.strerror})") from None
        with file:
            file.truncate(self._size)
            file.seek(self._size)
            more = True
            while more or engine.has_unfinished():
                while more and len(running) < _UNFINISHED:
                    line = next(waiting, None)
                    more = line is not None
                    if line is None:
                        break
                    requests += 1
                    name = f"line {line.number}"
                    try:
                        running[name] = line, _add(engine, name, line.content, params)
                    except RequestError as error:
                        errors.append(f"{self._source}, line {line.number}: {error}")
                        _append(file, _record(line) | {"error": str(error)})
                for output in engine.step():
                    if not output.finished:
                        continue
                    line, chat = running.pop(output.request_id)
                    tokens += output.num_tokens
                    if output.error is not None:
                        errors.append(output.error)
                    _append(file, _record(line) | _result(output, chat))
        return BatchResult(requests, len(self._done), tokens, tuple(errors))


def _read_lines(source: Path) -> Iterator[_Line]:
    try:
        text = source.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --input {source}: {error.strerror}") from None
    for number, data in enumerate(text.split(b"\n"), start=1):
        if not data.strip():
            continue
        where = f"{source}, line {number}"
        try:
            content = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        if not isinstance(content, dict) or ("prompt" in content) == ("messages" in content):
            raise UserError(f'{where}: should be an object with either "prompt" or "messages"')
        yield _Line(number, hashlib.sha256(data.strip()).hexdigest()[:16], content)


def _finished(out: Path, digests: Mapping[int, str]) -> tuple[set[int], int]:
    """The lines that are answered in ``out``, and its size without a line cut short."""
    try:
        data = out.read_bytes() if out.exists() else b""
    except OSError as error:
        raise UserError(f"cannot read --output {out}: {error.strerror}") from None
    size = data.rfind(b"\n") + 1
    done: set[int] = set()
    for at, line in enumerate(data[:size].splitlines(), start=1):
        try:
            record = json.loads(line)
            number, digest = record["line"], record["input_sha256"]
        except (ValueError, RecursionError, TypeError, KeyError):
            raise UserError(
                f"{out}, line {at}: not an answer of dsa-generate; name another --output"
            ) from None
        if digests.get(number) != digest:
            raise UserError(
                f"{out}, line {at}: answers line {number} of another --input; name another --output"
            )
        done.add(number)
    return done, size


def _add(
    engine: "Engine", name: str, content: Mapping[str, Any], params: "SamplingParams"
) -> "ChatPrompt | None":
    """Queue a line's request; its conversation, if it is one."""
    from dsa_compile.runtime import SamplingParams

    options = {each.name for each in fields(SamplingParams)}
    asked = {key: value for key, value in content.items() if key in options}
    others = {"id", "prompt"} if "prompt" in content else {"id", "messages", *_CHAT_FIELDS}
    unknown = sorted(content.keys() - options - others)
    if unknown:
        raise RequestError(f"unknown field {unknown[0]!r}")
    if isinstance(asked.get("logit_bias"), dict):  # JSON has no other keys than texts
        bias = asked["logit_bias"].items()
        asked["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in bias}
    chosen = replace(params, **asked)
    if "prompt" in content:
        engine.add_request(name, content["prompt"], chosen)
        return None
    given = {key: content[key] for key in _CHAT_FIELDS if key in content}
    chat = engine.chat_prompt(content["messages"], **given)
    engine.add_request(name, chat, chosen)
    return chat


def _record(line: _Line) -> dict[str, Any]:
    named = {"id": line.content["id"]} if "id" in line.content else {}
    return {"line": line.number, "input_sha256": line.digest, **named}


def _result(output: "RequestOutput", chat: "ChatPrompt | None") -> dict[str, Any]:
    result = output.to_dict()
    del result["request_id"]
    if chat is not None:
        result["message"] = chat.parse(output.text or "").message()
    return result


def _append(file: Any, record: Mapping[str, Any]) -> None:
    file.write((json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
    file.flush()
    os.fsync(file.fileno())
