"""A chat template as Hugging Face runs it: Jinja in a sandbox, with the same extensions and filters.

Templates come from outside, so the environment is immutable and sandboxed. Jinja's own ``tojson`` escapes HTML and
sorts keys; the override writes plain JSON. ``strftime_now`` gives the bundle's date, so
that a prompt does not depend on the day.
"""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import HeadraceError

Message = dict[str, Any]
"""A message as chat templates read it: role, content, tool_calls ..."""


class TemplateRefused(HeadraceError):
    """The template cannot render these messages; the text is the template's error."""


class _Generation(Extension):
    """The ``{% generation %}`` block, which marks what a model writes: rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime(date: str) -> Callable[[str], str]:
    day = datetime.date.fromisoformat(date or "1970-01-01")
    return lambda form: day.strftime(form)


@lru_cache(4)
def _compiled(source: str, date: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime(date)}
    return environment.from_string(source)


class ChatTemplate:
    """One compiled template with the variables that never change."""

    def __init__(self, source: str, variables: Mapping[str, Any], date: str) -> None:
        """variables: special tokens and template_kwargs. TemplateRefused when the source is not valid Jinja."""
        try:
            self._template = _compiled(source, date)
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the chat template is not valid Jinja: {error}") from None
        self._variables = dict(variables)

    def render(self, messages: Sequence[Message], tools: Sequence[Any], *, generation: bool) -> str:
        """The text of a conversation. generation: with the opening of the next turn. TemplateRefused."""
        try:
            return self._template.render(
                **self._variables, messages=messages, tools=list(tools) or None, add_generation_prompt=generation
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, LookupError) as error:
            raise TemplateRefused(str(error)) from None
