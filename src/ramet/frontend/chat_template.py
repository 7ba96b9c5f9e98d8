"""Renders chat templates as Hugging Face does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ramet.errors import InvalidArgument, Unsupported, shown

Message = Mapping[str, Any]


class _GenerationBlock(Extension):
    """``{% generation %}``, which marks the assistant's text for training, renders as its content."""

    tags = {"generation"}  # noqa: RUF012 - declared as an instance variable by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which jinja2's own filter makes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _environment(now: Callable[[], datetime]) -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class ChatTemplate:
    """A compiled chat template.

    Parameters
    ----------
    source : str
        The Jinja template.
    special_tokens : mapping, optional
        Names the template may use (``bos_token``, ``eos_token``, ...) and their text.
    now : callable, optional
        Gives the time that ``strftime_now`` shows; the local time by default.

    Raises
    ------
    InvalidArgument
        The template has a syntax error.

    Examples
    --------
    >>> template = ChatTemplate("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }};{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hi"}])
    'user: Hi;'
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment(now).from_string(source)
        except TemplateError as error:
            raise InvalidArgument(f"the chat template cannot be compiled: {_line(error)}.") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Return the prompt for a conversation.

        Parameters
        ----------
        messages : sequence of mappings
            Each with ``role`` and ``content``; the last one is the newest.
        add_generation_prompt : bool, default True
            End with the opening of the assistant's turn.
        **variables
            Further variables of the template (``enable_thinking=False``).

        Raises
        ------
        InvalidArgument
            The messages are no conversation, or the template refuses them.
        """
        check_messages(messages)
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **context
            )
        except TemplateError as error:
            raise InvalidArgument(f"the chat template refuses the messages: {_line(error)}.") from None
        except Exception as error:  # it is a program of the model's author, which can fail in any way
            raise InvalidArgument(f"the chat template fails on the messages: {_line(error)}.") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def check_messages(messages: object) -> None:
    """Refuse what is not a list of ``{"role": ..., "content": ...}``."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not len(messages):
        raise InvalidArgument(
            f"messages is {shown(messages)}; allowed: a non-empty list of {{'role': ..., 'content': ...}}."
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidArgument(f"messages[{i}] is {shown(message)}; allowed: {{'role': ..., 'content': ...}}.")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise InvalidArgument(f"messages[{i}]['content'] is {shown(content)}; allowed: a string.")


def choose_template(value: object, name: str = "default") -> str:
    """Return one template of a ``chat_template`` entry: a string, or a list of named ones."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(e, Mapping) and {"name", "template"} <= e.keys() for e in value):
        named = {entry["name"]: entry["template"] for entry in value}
        if name in named:
            return str(named[name])
        raise Unsupported(f"the model has no chat template {name!r}; it has: {', '.join(sorted(named))}.")
    raise Unsupported(f"the chat template is a {type(value).__name__}; a string or a list of named ones is read.")
