"""What a sample's text must look like: JSON, a regular expression, one of some strings, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ramet.errors import InvalidArgument, known_fields_only, shown

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@known_fields_only
@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a text; exactly one of the first five is given. Names are vLLM's.

    Parameters
    ----------
    json : str or dict, optional
        A JSON schema.
    json_object : bool, default False
        Any JSON object.
    regex : str, optional
        The whole text matches it.
    choice : list of str, optional
        The whole text is one of them.
    grammar : str, optional
        EBNF whose rule ``root`` the whole text matches.
    disable_any_whitespace : bool, default False
        With ``json`` and ``json_object``: no line breaks and no indents, one space after a comma and a colon.

    Raises
    ------
    InvalidArgument
        None of them is given, or several, or one of the wrong type. Whether a schema or a grammar is sound is found
        when the request is made.

    Examples
    --------
    >>> StructuredOutputsParams(choice=["yes", "no"]).kind
    'choice'
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise self._refuse(name, "True or False")
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidArgument(
                f"structured_outputs has {' and '.join(given) or 'none'} of {', '.join(KINDS)}; allowed: exactly one."
            )
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None and (
                not isinstance(getattr(self, name), str) or not getattr(self, name)
            ):
                raise self._refuse(name, "a non-empty string")
        if self.json is not None:
            object.__setattr__(self, "json", self._schema())
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices())

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def as_dict(self) -> dict[str, Any]:
        """Return what was given, as JSON has it."""
        value = getattr(self, self.kind)
        own: dict[str, Any] = {self.kind: list(value) if self.kind == "choice" else value}
        return own | ({"disable_any_whitespace": True} if self.disable_any_whitespace else {})

    def _schema(self) -> str:
        schema = self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise InvalidArgument(f"structured_outputs.json is not valid JSON: {error}.") from None
        if not isinstance(schema, Mapping):
            raise self._refuse("json", "a JSON schema: an object, or its text")
        try:
            return json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"structured_outputs.json is no JSON: {error}.") from None

    def _choices(self) -> tuple[str, ...]:
        given = self.choice
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
            raise self._refuse("choice", "a list of non-empty strings")
        found = tuple(given)
        if not found or not all(isinstance(text, str) and text for text in found):
            raise self._refuse("choice", "a list of non-empty strings")
        return found

    def _refuse(self, name: str, allowed: str) -> InvalidArgument:
        return InvalidArgument(f"structured_outputs.{name} is {shown(getattr(self, name))}; allowed: {allowed}.")
