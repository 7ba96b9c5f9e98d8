"""Answers that end with their client: streams of events, and work that a disconnect cancels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ramet.server.errors import ApiError

encode_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(encode_json(value), status, headers, media_type="application/json")


class EventStream(Response):
    """A stream of events that is closed, and what makes it too, when the client goes.

    Parameters
    ----------
    parts : async generator of bytes
        Closed in any case; cancelled where it waits.
    timeout : float
        Seconds until a client that takes nothing is given up.
    on_end : callable
        Called once, when all is over.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], timeout: float, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._parts, self._timeout, self._on_end = parts, timeout, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(send))
        except TimeoutError:
            raise ReaderTooSlow(f"its reader took nothing for {self._timeout:g} s") from None
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self._parts:
                async with asyncio.timeout(self._timeout):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await self._parts.aclose()


class ReaderTooSlow(Exception):
    """A client that keeps its connection open and reads nothing."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T | None:
    """Return the result of some work, or None if the client has gone before; the work is cancelled then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        return task.result()
    finally:
        for other in (task, watcher):
            other.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await other


async def result_unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of some work; raises what is logged as status 499 if the client has gone."""
    result = await unless_gone(request.receive, work)
    if result is None:
        raise ApiError(499, "the client has gone.")
    return result


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
