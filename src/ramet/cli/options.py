"""Command-line options: flags made from the fields of dataclasses, a configuration file below them, then defaults.

No option has an argparse default: what a namespace holds was given, so that flags, configuration file and defaults can
be laid over each other, and every effective value knows where it came from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from ramet.errors import InvalidArgument, nearest, shown


class Parser(argparse.ArgumentParser):
    """An argument parser that raises our errors and remembers the defaults it shows."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)
        self.defaults: dict[str, Any] = {}
        self._positionals.title = "Arguments"
        self._optionals.title = "Other"

    def error(self, message: str) -> NoReturn:
        raise InvalidArgument(f"{message} (see {self.prog} --help)")

    def option(self, group: Any, *names: str, default: Any = None, help: str, **kwargs: Any) -> None:
        """Add an option; its default is shown and kept, not set."""
        shown = _shown(default)
        action = group.add_argument(
            *names, default=argparse.SUPPRESS, help=f"{help} (default: {shown})".replace("%", "%%"), **kwargs
        )
        self.defaults[action.dest] = default

    def dests(self) -> dict[str, argparse.Action]:
        """Every setting this parser takes, by its name in a configuration file."""
        return {a.dest: a for a in self._actions if a.dest not in ("help", "config")}

    def known_flags(self) -> list[str]:
        """All flags, for suggestions."""
        return [flag for action in self._actions for flag in action.option_strings]


class _Formatter(argparse.HelpFormatter):
    """Wide enough for a flag and its text on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


@dataclass(frozen=True)
class Settings:
    """The settings of one command.

    Attributes
    ----------
    values : dict
        Setting to effective value.
    sources : dict
        Of the settings that were given: ``"flag"`` or ``"config file"``.
    """

    values: dict[str, Any]
    sources: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def given(self, names: Collection[str]) -> dict[str, Any]:
        """Those of ``names`` that were given, by flag or configuration file."""
        return {name: self.values[name] for name in names if name in self.sources}


def parse(parser: Parser, argv: Sequence[str], read_config: Callable[[str], Mapping[str, Any]]) -> Settings:
    """Parse flags, lay them over the configuration file they name, and that over the defaults.

    Parameters
    ----------
    parser : Parser
        Of one command.
    argv : sequence of str
        What follows the command.
    read_config : callable
        Returns the settings in the file given by ``--config``.
    """
    flags = _parse_strictly(parser, argv)
    path = flags.pop("config", None)
    from_file = {} if path is None else _parse_config(parser, path, read_config(path))
    values = {**parser.defaults, **from_file, **flags}
    sources = dict.fromkeys(from_file, "config file") | dict.fromkeys(flags, "flag")
    return Settings(values, sources)


def _parse_strictly(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    # Intermixed: the plain method takes an optional MODEL for missing when flags stand before it.
    namespace, rest = parser.parse_known_intermixed_args(list(argv))
    if rest:
        unknown = rest[0].split("=")[0]
        hint = nearest(unknown, parser.known_flags()) if unknown.startswith("-") else ""
        parser.error(f"unrecognized argument {unknown!r}{hint}")
    return vars(namespace)


def _parse_config(parser: Parser, path: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Turn entries into flags and parse those, so that a file is checked exactly as a command line is."""
    actions = parser.dests()
    argv: list[str] = []
    positional: list[str] = []
    seen: set[str] = set()
    for key, value in entries.items():
        name = str(key).replace("-", "_")
        if name not in actions:
            raise InvalidArgument(f"{path}: there is no setting {str(key)!r}{nearest(name, actions)}")
        if name in seen:
            raise InvalidArgument(f"{path}: {name!r} is there twice, with '-' and with '_'; keep one.")
        seen.add(name)
        action = actions[name]
        if not action.option_strings:
            positional.append(str(value))
        else:
            argv += _as_flag(action, value, f"{path}: {key}")
    try:
        return _parse_strictly(parser, [*positional, *argv])
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None


def _as_flag(action: argparse.Action, value: Any, where: str) -> list[str]:
    flag = next(f for f in action.option_strings if f.startswith("--"))
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise InvalidArgument(f"{where} is {shown(value)}; allowed: true or false.")
        if isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else f"--no-{flag[2:]}"]
        return [flag] if value else []
    if isinstance(value, list) and action.nargs is None and not isinstance(action, argparse._AppendAction):
        raise InvalidArgument(f"{where} is {shown(value)}; allowed: one value.")
    values = list(value) if isinstance(value, list) else [value]
    texts = [json.dumps(v) if isinstance(v, dict) else str(v) for v in values]  # null is 'None', where that is allowed
    if action.nargs == "+":
        return [flag, *texts]
    return [f"{flag}={text}" for text in texts]


# --- flags from dataclasses ------------------------------------------------------------------------------------------


def add_fields(
    parser: Parser,
    group: Any,
    cls: type,
    *,
    skip: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for every field of a dataclass, with the text of its docstring.

    Parameters
    ----------
    parser, group
        Where they go.
    cls : dataclass
        Its numpy docstring is the help; its annotations give the types.
    skip : collection of str
        Fields without a flag.
    aliases : mapping, optional
        Field to a further, short flag.
    defaults, helps : mapping, optional
        Field to another default or text than the dataclass has.
    """
    docs, hints = field_docs(cls), get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if item.name in skip:
            continue
        default = item.default if defaults is None or item.name not in defaults else defaults[item.name]
        text = (helps or {}).get(item.name) or docs.get(item.name) or "Off or on."
        flag = "--" + item.name.replace("_", "-")
        names = [*([aliases[item.name]] if aliases and item.name in aliases else []), flag]
        parser.option(group, *names, default=default, help=text, **_argument(hints[item.name]))


def field_docs(cls: type) -> dict[str, str]:
    """Return the text of each parameter in a numpy docstring, on one line."""
    docs: dict[str, str] = {}
    body = re.split(r"\n\s*Parameters\n\s*-+\n", cls.__doc__ or "")
    if len(body) < 2:
        return docs
    names: list[str] = []
    for line in re.split(r"\n\s*\w+\n\s*---+\n", body[1])[0].splitlines():
        head = re.match(r"    (\w+(?:, \w+)*) : ", line)
        if head:
            names = head[1].split(", ")
            docs |= dict.fromkeys(names, "")
        elif line.strip():
            docs |= {name: f"{docs[name]} {line.strip()}".strip() for name in names}
    return {name: text.replace("``", "'") for name, text in docs.items()}


def integer_or_none(text: str) -> int | None:
    """Parse an integer, or ``none``."""
    return None if text.lower() == "none" else int(text)


def json_object(text: str) -> dict[Any, Any]:
    """Parse a JSON object whose keys are integers, as ``logit_bias`` has."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")  # argparse makes the message
    return {int(k): v for k, v in value.items()}


integer_or_none.__name__, json_object.__name__ = "integer or none", "JSON object"  # argparse names them in errors


def _argument(hint: Any) -> dict[str, Any]:
    """What argparse needs for an annotation."""
    options = [h for h in get_args(hint) if h is not type(None)] if _is_union(hint) else [hint]
    optional = _is_union(hint) and type(None) in get_args(hint)
    lists = [h for h in options if get_origin(h) in (list, tuple)]
    if lists:
        if int in get_args(lists[0]):
            return {"nargs": "+", "type": int, "metavar": "ID"}
        return {"action": "append", "metavar": "TEXT"}
    kind = options[0]
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is dict:
        return {"type": json_object, "metavar": "JSON"}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is int:
        return {"type": integer_or_none if optional else int, "metavar": "N"}
    return {"type": kind, "metavar": "X" if kind is float else "TEXT"}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)
