"""What every request goes through: its id, the key, errors in OpenAI's form, a line in the log."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Sequence
from time import perf_counter

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ramet.server.errors import ApiError, as_api_error
from ramet.server.sse import json_response

log = logging.getLogger(__name__)
access = logging.getLogger("ramet.access")

OPEN_PATHS = frozenset({"/health", "/version", "/metrics"})
"""Answered without a key: those who ask are load balancers and Prometheus."""

_QUIET_PATHS = frozenset({"/health", "/metrics"})
"""Asked every few seconds; logged on the debug level."""

_CLIENT_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
CLIENT_GONE = 499
"""The status, known from nginx, under which the log has requests whose client did not wait for the answer."""


class Gate:
    """An ASGI application around another.

    Parameters
    ----------
    app : ASGI application
    api_keys : sequence of str
        Any of them opens; none means that no key is asked for.
    access_log : bool
        Whether each request gets a line.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], access_log: bool) -> None:
        self._app, self._access_log = app, access_log
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, started = Headers(scope=scope), perf_counter()
        own = headers.get("x-request-id", "")
        state = scope.setdefault("state", {})
        if _CLIENT_ID.fullmatch(own):
            state["client_request_id"] = own
        request_id = state["request_id"] = state.get("client_request_id") or uuid.uuid4().hex
        status = 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_key(scope["path"], headers)
            await self._app(scope, receive, send_noting)
        except Exception as error:
            if status:  # too late for another answer: what has begun is broken off
                log.error("request %s is broken off: %s: %s", request_id, type(error).__name__, error)
                raise
            await error_response(error, request_id)(scope, receive, send_noting)
        finally:
            if self._access_log:
                self._note(scope, request_id, status, perf_counter() - started)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        matches = [hmac.compare_digest(given, one) for one in self._keys]  # all of them: the time tells nothing
        if scheme.lower() != "bearer" or not any(matches):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    @staticmethod
    def _note(scope: Scope, request_id: str, status: int, seconds: float) -> None:
        level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
        if not access.isEnabledFor(level):
            return
        host = scope["client"][0] if scope.get("client") else "-"
        path = scope["path"].encode("ascii", "backslashreplace").decode()
        path = "".join(c if c.isprintable() else "?" for c in path)[:200]
        code = status or CLIENT_GONE
        access.log(level, "%s %s %s %d %.3f s %s", host, scope["method"], path, code, seconds, request_id)


def error_response(error: Exception, request_id: str) -> Response:
    """Return the answer to a request that failed; what the client is not told goes to the log."""
    told = as_api_error(error, request_id)
    if told.status >= 500 and told is not error:
        log.error("request %s failed: %s", request_id, error, exc_info=error if told.status == 500 else None)
    return json_response(told.body(), told.status, told.headers)
