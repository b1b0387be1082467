"""Tools that a model may, must or must not call: ``tools``, ``tool_choice``, and its grammar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_compile.chat import ChatFormat
from dsa_compile.chat.tools import callable_tools
from dsa_compile.errors import ParameterError, RequestError
from dsa_compile.runtime.requests.grammar import Grammar
from dsa_compile.server.errors import bad_request, from_request_error, unsupported

_FIELD = "tool_choice"


@dataclass(frozen=True)
class ToolChoice:
    """Tools that a request allows or requires.

    Attributes:
        tools: that the model sees and may call, in the form of chats; None for none.
        required: whether the answer must be a call.
        only: the name of the tool that must be called; None for any.
    """

    tools: Sequence[Mapping[str, Any]] | None
    required: bool = False
    only: str | None = None

    def grammar(self, form: ChatFormat, prompt: str, many: bool) -> Grammar | None:
        """The grammar of an answer that must be a call; None for any other.

        Args:
            form: how the model writes calls.
            prompt: of the request.
            many: whether several calls are wanted, if they need not be of one tool.

        Raises:
            ApiError: there is no tool to call, or no known syntax (400).
        """
        if self.tools and not form.reads_calls:
            field = _FIELD if self.required else "tools"
            raise unsupported(field, "the model's template writes calls in no known syntax")
        if not self.required:
            return None
        try:
            many &= self.only is None
            tag = form.forced_calls(prompt, self.tools or (), only=self.only, many=many)
            assert tag is not None, "the format reads calls"
            return Grammar.structural_tag(tag)
        except ParameterError as error:
            problem = str(error).partition("structural_tag ")[2]
            raise bad_request(f"tools: the grammar of their calls {problem}", "tools") from None
        except RequestError as error:
            raise from_request_error(error, _FIELD) from None


def tool_choice(tools: list[dict[str, Any]] | None, choice: Any) -> ToolChoice:
    """Read a request's tools and ``tool_choice``.

    Args:
        tools: in the form of chats.
        choice: the field: ``auto``, ``none``, ``required``, or a function, by its name in the form
            of chats or of responses.

    Raises:
        ApiError: it is none of these, or names no tool (400).
    """
    only: str | None = None
    match choice:
        case None | "auto":
            return ToolChoice(tools or None)
        case "none":
            return ToolChoice(None)
        case "required":
            pass
        case {"type": "function", "function": {"name": str(only)}}:
            pass
        case {"type": "function", "name": str(only)}:
            pass
        case _:
            known = '"auto", "none", "required", or a function by its name'
            raise bad_request(f"{_FIELD} must be {known}", _FIELD)
    try:
        callable_tools(tools, only)
    except RequestError as error:
        raise from_request_error(error, _FIELD) from None
    return ToolChoice(tools, required=True, only=only)
