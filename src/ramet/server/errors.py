"""Errors as OpenAI's clients know them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ramet.errors import CapacityExceeded, Closed, EngineDead, InvalidArgument, OutOfMemory, TooLong, Unsupported

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """What a client gets instead of an answer.

    Parameters
    ----------
    status : int
        HTTP status.
    message : str
        What was wrong, the value, what is allowed, how to change it; no paths.
    param : str, optional
        The field it is about.
    code : str, optional
        For programs.
    headers : mapping, optional
        Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the answer's body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception, request_id: str) -> ApiError:
    """Return what a client may know of an exception.

    Parameters
    ----------
    error : Exception
    request_id : str
        Named where the log tells more.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TooLong):
        return ApiError(400, str(error), param="prompt", code="context_length_exceeded")
    if isinstance(error, InvalidArgument | Unsupported):
        return ApiError(400, str(error), param=_param(str(error)))
    if isinstance(error, EngineDead):
        return ApiError(500, f"the engine ended; the server's log tells more under request {request_id}.")
    if isinstance(error, Closed):
        return ApiError(503, str(error), headers={"Retry-After": "5"})
    if isinstance(error, OutOfMemory | CapacityExceeded):
        return ApiError(503, str(error))
    return ApiError(500, f"internal error; the server's log tells more under request {request_id}.")


def _param(message: str) -> str | None:
    """The field that an error of ours is about: its message begins with it."""
    found = re.match(r"([a-z_][\w.]*)(?:\[[^\]]*\])*(?:\['\w+'\])? (?:is|has|cannot|needs)\b", message)
    return found[1] if found else None
