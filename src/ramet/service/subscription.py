"""Requests that are followed together, and those who want to know what happens to requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ramet.engine.group import GroupEvent, GroupRequest
from ramet.errors import RametError
from ramet.outputs import RequestOutput

Made = tuple[GroupRequest, RequestOutput]


class Observer(Protocol):
    """Who wants to know what happens to requests (the server's metrics). Called in the event loop: be quick."""

    def began(self, output: RequestOutput) -> None:
        """A request was handed to the engine."""

    def news(self, request_id: str, tokens: int, samples: int, ends: int, now: float) -> None:
        """New ``tokens`` of some ``samples`` of a request came, of which some ``ends``, at ``now`` of
        ``time.monotonic()``; of one that does not stream only together with the ends."""

    def ended(self, output: RequestOutput, event: GroupEvent, now: float) -> None:
        """A request ended, in whatever way."""


class Changed(NamedTuple):
    """News of one of several requests that are followed together: its number, its answer."""

    number: int
    output: RequestOutput


class Subscription:
    """Requests that are followed together.

    Attributes
    ----------
    number : dict
        Request id to number.
    backlog : int
        Tokens that came and were not taken yet.
    unread : set of str
        Requests of which only the end is told: what comes before has no reader to wait for.
    error : RametError or None
        Why there will be no more news.
    """

    def __init__(self, made: Sequence[Made]) -> None:
        self.number = {request.request_id: i for i, (request, _) in enumerate(made)}
        self.unread = {request.request_id for request, _ in made if not request.streams}
        self.wake = asyncio.Event()
        self.backlog = 0
        self.error: RametError | None = None

    def fail(self, error: RametError) -> None:
        """End it with an error."""
        self.error = self.error or error
        self.wake.set()
