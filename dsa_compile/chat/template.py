"""Chat templates that models ship, in Jinja: rendered in a sandbox, as ``transformers`` does.

A template sees the variables and helpers that it sees there: ``messages``, ``tools``,
``add_generation_prompt``, special tokens by name, ``tojson``, ``raise_exception``,
``strftime_now``, loop controls and ``{% generation %}``. It can neither reach Python objects nor
change what it is given. Its size, that of what it renders and the numbers that it gives for sizes
are limited; its running time, and a text that it doubles again and again, are not, so take
templates from whom you take weights, never from a request.
"""

import json
import re
from collections.abc import Callable, Mapping, Sized
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dsa_compile.errors import ArtifactError, ChatError

MAX_TEMPLATE = 1 << 20  # characters; published ones have up to about 20,000
MAX_PROMPT = 1 << 26
_MOST_AT_ONCE = MAX_PROMPT


class ChatTemplate:
    """A compiled template.

    Attributes:
        source: its text.

    Args:
        source: in Jinja.
        where: its file, for errors.

    Raises:
        ArtifactError: it is too long, or no template.
    """

    def __init__(self, source: str, where: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise ArtifactError(
                f"{where}: the chat template has {len(source)} characters, more than {MAX_TEMPLATE}"
            )
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ArtifactError(
                f"{where}: line {error.lineno} of the chat template: {error.message}"
            ) from None
        except Exception as error:  # Python's own compiler refuses some of what Jinja parses
            raise ArtifactError(f"{where}: the chat template does not compile ({error})") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text that the template makes of its variables.

        Raises:
            ChatError: the template refuses them, fails, or writes more than :data:`MAX_PROMPT`
                characters.
        """
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                length += len(part)
                if length > MAX_PROMPT:
                    raise ChatError("messages", f"the prompt exceeds {MAX_PROMPT} characters")
        except ChatError:
            raise
        except TemplateError as error:
            raise ChatError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from None
        except Exception as error:  # a template can fail in any way that an expression can
            problem = f"the model's chat template fails ({type(error).__name__}: {error})"
            raise ChatError("messages", problem) from None
        return "".join(parts)


class _Generation(Extension):
    """``{% generation %}``, which marks an assistant's text for training, renders what it holds."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which no number asks for more than a prompt may have.

    What a template writes is counted when it is there, which is late for the gigabytes that one
    multiplication or one width can make.
    """

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See ``SandboxedEnvironment``."""
        if operator == "%" and isinstance(left, str):
            _require_small(*map(int, _NUMBER.findall(left)))
        elif operator == "*":
            for some, times in ((left, right), (right, left)):
                if isinstance(some, Sized) and isinstance(times, int):
                    _require_small(len(some) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _require_small(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        """See ``SandboxedEnvironment``."""
        _require_small(*args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)


_NUMBER = re.compile(r"\d{1,19}")


def _require_small(*sizes: Any) -> None:
    if any(isinstance(size, int) and size > _MOST_AT_ONCE for size in sizes):
        raise TemplateError(f"it asks for more than {_MOST_AT_ONCE} characters at once")


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes no width beyond what a prompt may have."""

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _require_small(*args, *kwargs.values())
        return function(*args, **kwargs)

    return wrapped


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    for name in ("center", "indent", "batch", "slice"):
        environment.filters[name] = _bounded(environment.filters[name])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what HTML would interpret, and a prompt is no HTML
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
