"""Errors meant for users: one line that says what is wrong and what to do.

Everything a user can cause raises a subclass of :class:`UserError`; the command-line tools print
its message and exit with status 2. ``assert`` is kept for our own invariants.
"""

import reprlib
import string
from collections.abc import Callable, Mapping

# A line for a terminal or a log, however long the texts are that it repeats.
_LONGEST = 2000
_KEPT_AT_END = 500  # where the remedy is


def _cut(message: str) -> str:
    if len(message) <= _LONGEST:
        return message
    return f"{message[: _LONGEST - _KEPT_AT_END - 3]} … {message[-_KEPT_AT_END:]}"


class UserError(ValueError):
    """Error in something that the user gave; the message says what, where, and how to mend it.

    A message beyond 2,000 characters is cut in the middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_cut(message))


class OptionError(UserError, TypeError):
    """A keyword argument that nothing takes; suggests the name that was probably meant."""


class _Spelling(dict[str, str]):
    """Spellings of options by their names, whatever they are."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell

    def __missing__(self, name: str) -> str:
        return self._spell(name)


NAMES: Mapping[str, str] = _Spelling(str)
"""Options as Python calls them."""
FLAGS: Mapping[str, str] = _Spelling(lambda name: "--" + name.replace("_", "-"))
"""Options as commands call them."""


class OptionValueError(UserError):
    """An option's value that cannot be, or two options that contradict each other.

    Args:
        template: the message, in which ``{name}`` stands for an option, and ``{}`` for a value.
        *values: those.
    """

    def __init__(self, template: str, *values: object) -> None:
        super().__init__(string.Formatter().vformat(template, values, NAMES))
        self._given = (template, *values)

    def spelt(self, names: Mapping[str, str]) -> str:
        """The message with options in another spelling, such as :data:`FLAGS`."""
        template, *values = self._given
        return _cut(string.Formatter().vformat(str(template), values, names))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._given


class ConfigError(UserError):
    """The model's configuration is not one this compiler takes."""


class CheckpointError(UserError):
    """The weights are missing, truncated, misshapen or not those of the configuration."""


class CompileError(UserError):
    """A pass could not do what it promises; names the pass and the nearest near-miss."""


class ArtifactError(UserError):
    """The artifact is absent, incomplete, edited, of another version or for another model."""


class RequestError(UserError):
    """A generation request that cannot be served; names the request and the limit."""


class ParameterError(RequestError):
    """An option of a request that is wrong.

    Attributes:
        param: its name.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class ChatError(RequestError):
    """Messages, tools or options of a chat request that cannot be encoded; an HTTP 400.

    Attributes:
        param: the field at fault, such as ``messages[3].tool_calls[0].function.arguments``.
    """

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


def shown(value: object, most: int = 200) -> str:
    """The ``repr`` of a value for an error message, cut in the middle to ``most`` characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = most
    short.maxlist = short.maxtuple = short.maxdict = short.maxset = 20
    try:
        text = short.repr(value)
    except Exception:  # such as an integer of more digits than Python converts
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 4]} …"
