"""The exceptions Ramet raises. Everything a caller can mend derives from :class:`RametError`.

Bad arguments are both a ``RametError`` and a ``ValueError``, so that callers of the attention library need not know
our hierarchy. A message says what was wrong, the value, what is allowed, and how to change it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar


class RametError(Exception):
    """Base of all errors that Ramet raises on purpose."""


class InvalidArgument(RametError, ValueError):
    """An argument or a field has a value that is not allowed.

    Attributes
    ----------
    prompt : int, optional
        Which one of several prompts of a call it is about; then the message begins with it.
    """

    prompt: int | None = None

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.prompt is None else f"prompts[{self.prompt}]: {text}"


class TooLong(InvalidArgument):
    """A prompt, or what is to follow it, does not fit the longest sequence that the engine has room for."""


class Unsupported(RametError, ValueError):
    """What was asked for is known but not supported; the message names it."""


class ModelError(RametError):
    """A model folder, file, name or weight cannot be used."""


class OutOfMemory(RametError):
    """Memory does not suffice; the message says which setting to change, and to what."""


class CapacityExceeded(RametError):
    """A fixed capacity (pages, slots, items of a plan) is exhausted."""


class Closed(RametError):
    """The engine was closed; no further call is possible."""


class EngineDead(Closed):
    """The engine's process or thread ended by itself; the message says how, and what it logged last."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest known name, or a full stop.

    Examples
    --------
    >>> nearest("temprature", ["temperature", "top_p"])
    "; did you mean 'temperature'?"
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else "."


def shown(value: object) -> str:
    """Return a value as an error message shows it: its ``repr`` on one line, cut where it is long.

    Examples
    --------
    >>> shown([1.5, "two"])
    "[1.5, 'two']"
    >>> shown("x" * 1000)[-4:], len(shown("x" * 1000))
    ('x...', 60)
    """
    try:
        text = repr(value)
    except Exception:  # an integer of more digits than Python prints, or somebody's faulty __repr__
        text = f"a value of type {type(value).__name__}"
    text = " ".join(text.split())  # arrays and data frames print several lines
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def allocating(words: str) -> Iterator[None]:
    """Turn an allocation that fails in the block into an :class:`OutOfMemory` with these words.

    Examples
    --------
    >>> with allocating("a list does not fit: make it shorter."):
    ...     [0] * 2**62
    Traceback (most recent call last):
    ramet.errors.OutOfMemory: a list does not fit: make it shorter.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):  # how torch says it on a CPU
            raise
        raise OutOfMemory(words) from None


T = TypeVar("T", bound=type)


def known_fields_only(cls: T) -> T:
    """Class decorator for dataclasses: an unknown keyword is an :class:`InvalidArgument` with the nearest name."""
    names = tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise InvalidArgument(
                    f"{cls.__name__} has no field {name!r}{nearest(name, names)} Known fields: {', '.join(names)}."
                )
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
