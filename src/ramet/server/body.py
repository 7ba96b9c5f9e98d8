"""Reading the body of a request: its size, its kind, its JSON, and single values of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from ramet.errors import shown
from ramet.server.errors import ApiError


async def read_json(request: Request, *, max_bytes: int, optional: bool = False) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Parameters
    ----------
    request : Request
    max_bytes : int
    optional : bool, default False
        An empty body is an empty object.

    Raises
    ------
    ApiError
        413 too long, 415 of another kind, 400 no JSON object.
    """
    data = await _read(request, max_bytes)
    if optional and not data.strip():
        return {}
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the content type is {shown(kind)}; allowed: application/json.")
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply.") from None
    except ValueError as error:  # JSON or UTF-8
        raise ApiError(400, f"the body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is {shown(value)}; allowed: a JSON object.")
    return value


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        _refuse_size(max_bytes)
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                _refuse_size(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(499, "the client has gone.") from None
    return b"".join(parts)


def _refuse_size(max_bytes: int) -> NoReturn:
    message = f"the body is longer than {max_bytes:,} bytes (--max-body-bytes); send less."
    raise ApiError(413, message, headers={"Connection": "close"})


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false."""
    value = fields.get(name, default)
    if not isinstance(value, bool):
        raise ApiError(400, f"{name} is {shown(value)}; allowed: true or false.", param=name)
    return value


def integer(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Return a field that is an integer, None if it is not there."""
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(400, f"{name} is {shown(value)}; allowed: an integer from {low} to {high:,}.", param=name)
    return value
