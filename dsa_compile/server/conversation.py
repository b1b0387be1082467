"""Conversations of other APIs in the form of chats: messages, and where each part came from."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from dsa_compile.server.errors import ApiError

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 32
NO_TEXT = "[%s left out: text alone is read]"
"""What the model reads where something stood that is no text, by its kind."""


class Conversation:
    """The messages of a request, where each part of them comes from, and what was left out.

    Args:
        fields: names that the API has for fields of chats, where they differ.

    Attributes:
        messages: in the form of chats.
        fields: names of fields by those of chats: ``input[3]`` by ``messages[1].tool_calls[0]``.
        left_out: what this server cannot do and the answer goes without.
    """

    def __init__(self, fields: Mapping[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.fields = dict(fields)
        self.left_out: list[str] = []

    def leave_out(self, param: str, kind: object = None) -> None:
        """Note a part of the request that the answer goes without, and of which kind it is.

        Both are the client's words, and go to a header and the log: in ASCII, and not at length.
        """
        param = ascii(param)[1:-1][:80]
        self.left_out.append(param if kind is None else f"{param} ({kind!a:.80})")

    def headers(self) -> dict[str, str]:
        """A header that says what was left out; the log gets it, too."""
        if not self.left_out:
            return {}
        more = len(self.left_out) - _MOST_NAMED
        said = ", ".join(self.left_out[:_MOST_NAMED]) + (f", {more} more" if more > 0 else "")
        _LOG.info("left out of a request: %s", said)
        return {"x-left-out": said}

    def own_name(self, error: ApiError) -> ApiError:
        """An error about a field of chats, by the field's name in the API."""
        error.param = error.param and self._own(error.param)
        message = error.message.removeprefix("sampling parameter ")
        named = re.match(r"[\w.\[\]]*", message)
        if named is not None:
            error.message = self._own(named[0]) + message[named.end() :]
        return error

    def _own(self, name: str) -> str:
        name = re.sub(r"^(tools\[\d+\])\.function\b", r"\1", name)
        for known in sorted(self.fields, key=len, reverse=True):
            rest = name[len(known) :]
            if name.startswith(known) and rest[:1] in ("", ".", "["):
                return self.fields[known] + rest
        return name

    def begin(self, message: dict[str, Any], param: str) -> None:
        """Add a message, made of the field ``param``."""
        self.fields[f"messages[{len(self.messages)}]"] = param
        self.messages.append(message)

    def call(self, call_id: Any, name: Any, arguments: Any, own: Mapping[str, str]) -> None:
        """Add a call to the last message.

        Args:
            call_id: that its result refers to.
            name: of the function.
            arguments: JSON text or an object.
            own: where the call, its ``.function`` and its ``.id`` come from.
        """
        function = {"name": name, "arguments": arguments}
        calls = self.messages[-1].setdefault("tool_calls", [])
        for part, place in own.items():
            self.name(f"tool_calls[{len(calls)}]{part}", place)
        calls.append({"id": call_id, "type": "function", "function": function})

    def name(self, field: str, own: str) -> None:
        """Note where a field of the last message comes from."""
        self.fields[f"messages[{len(self.messages) - 1}].{field}"] = own
