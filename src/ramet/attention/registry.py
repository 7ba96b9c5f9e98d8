"""Which backend serves a problem: one ordered list, edited by name, and the reason of every choice.

``RAMET_ATTENTION="-cpu"`` takes a backend out, ``"+reference"`` puts one first, ``"reference"`` or ``"reference,cpu"``
is an exact list. A backend that was pinned is used or refused, never replaced.
"""

from __future__ import annotations

import os
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from ramet.attention.backends.base import Backend
from ramet.attention.backends.cpu import CpuBackend
from ramet.attention.backends.fa4 import Fa4Backend
from ramet.attention.backends.reference import ReferenceBackend
from ramet.attention.backends.triton import TritonBackend
from ramet.attention.problem import Problem, Support
from ramet.errors import InvalidArgument, Unsupported, nearest

ENVIRONMENT = "RAMET_ATTENTION"

BACKENDS: MappingProxyType[str, Backend] = MappingProxyType(
    {"cpu": CpuBackend(), "triton": TritonBackend(), "fa4": Fa4Backend(), "reference": ReferenceBackend()}
)
"""All backends, in the order in which they are asked."""


class Explanation(NamedTuple):
    """Which backend serves a problem and why; also why those asked before it do not.

    Attributes
    ----------
    backend : str or None
        None when no backend serves the problem.
    reason : str
        The backend's own words, or the words of the error that selecting would raise.
    declined : tuple of (str, str)
        Backend and reason, in the order they were asked.
    order : tuple[str, ...]
        The order in which they are asked.
    """

    backend: str | None
    reason: str
    declined: tuple[tuple[str, str], ...]
    order: tuple[str, ...]

    def __str__(self) -> str:
        head = f"{self.backend}: {self.reason}" if self.backend else self.reason
        return "; ".join([head, *(f"{name} declined: {why}" for name, why in self.declined)])


@lru_cache(maxsize=64)
def backend_order(edits: str) -> tuple[str, ...]:
    """Read ``"+a,-b"`` (edits of the built-in order) or ``"a,b"`` (an exact list).

    Raises
    ------
    InvalidArgument
        An unknown name, edits mixed with exact names, or nothing left.

    Examples
    --------
    >>> backend_order("")
    ('cpu', 'triton', 'fa4', 'reference')
    >>> backend_order("+reference")
    ('reference', 'cpu', 'triton', 'fa4')
    >>> backend_order("reference")
    ('reference',)
    """
    words = [word.strip() for word in edits.split(",") if word.strip()]
    signed = [word for word in words if word[0] in "+-"]
    for word in words:
        _known(word[1:] if word[0] in "+-" else word)
    if signed and len(signed) != len(words):
        raise InvalidArgument(
            f"{edits!r} mixes edits (+name, -name) with exact names; use only edits, or only exact names."
        )
    if words and not signed:
        return tuple(dict.fromkeys(words))
    order = list(BACKENDS)
    for word in words:
        rest = [name for name in order if name != word[1:]]
        order = [word[1:], *rest] if word[0] == "+" else rest
    if not order:
        raise InvalidArgument(f"{edits!r} leaves no attention backend; take one of the edits out.")
    return tuple(order)


def supports(problem: Problem, backend: str) -> Support:
    """Whether one backend serves a problem, and why.

    Examples
    --------
    >>> supports(Problem(4, 2, 64, 16, device="cuda"), "cpu")
    Support(ok=False, reason='cpu serves tensors on the CPU, not on cuda')
    """
    return BACKENDS[_known(backend)].supports(problem)


def _known(name: str) -> str:
    if name not in BACKENDS:
        raise InvalidArgument(
            f"no attention backend is called {name!r}{nearest(name, BACKENDS)} Known: {', '.join(BACKENDS)}."
        )
    return name


def select(problem: Problem, backend: str | None = None) -> Backend:
    """The first backend in order that serves the problem.

    Parameters
    ----------
    problem : Problem
    backend : str, optional
        A name, an exact list or edits; default: the environment variable ``RAMET_ATTENTION``.

    Raises
    ------
    InvalidArgument
        The list is not valid.
    Unsupported
        None of them serves the problem; the message has every reason.
    """
    found = _explain(problem, backend_order(os.environ.get(ENVIRONMENT, "") if backend is None else backend))
    if found.backend is None:
        raise Unsupported(str(found))
    return BACKENDS[found.backend]


def explain(problem: Problem, backend: str | None = None) -> Explanation:
    """Say which backend :func:`select` would choose, and why; it never raises for a problem that nobody serves.

    Examples
    --------
    >>> print(explain(Problem(4, 2, 64, 16, device="cuda"), "cpu"))
    no attention backend serves this problem; cpu declined: cpu serves tensors on the CPU, not on cuda
    """
    return _explain(problem, backend_order(os.environ.get(ENVIRONMENT, "") if backend is None else backend))


@lru_cache(maxsize=256)  # the key is everything that the choice reads
def _explain(problem: Problem, order: tuple[str, ...]) -> Explanation:
    declined: list[tuple[str, str]] = []
    for name in order:
        answer = BACKENDS[name].supports(problem)
        if answer.ok:
            return Explanation(name, answer.reason, tuple(declined), order)
        declined.append((name, answer.reason))
    return Explanation(None, "no attention backend serves this problem", tuple(declined), order)
