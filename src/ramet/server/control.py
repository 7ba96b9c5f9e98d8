"""Looking at the server and steering it: models, health, version, metrics; pause, resume, abort, the prefix cache."""

from __future__ import annotations

from importlib.metadata import version as package_version

from starlette.requests import Request
from starlette.responses import Response

from ramet.errors import shown
from ramet.server.body import flag, read_json
from ramet.server.errors import ApiError
from ramet.server.fields import ABORT, PAUSE
from ramet.server.sse import json_response
from ramet.server.state import ServerState, state_of
from ramet.service.loop import PAUSE_MODES

MISSING = {
    "/sleep": "the engine cannot give its memory back and come again yet; stop the server instead",
    "/wake_up": "the engine cannot sleep yet, so there is nothing to wake up",
    "/update_weights": "the engine cannot take new weights while it runs yet; restart the server with them",
}
"""Endpoints whose part of the engine does not exist yet."""


async def health(request: Request) -> Response:
    """200 while requests can be served, else 503 with the reason."""
    state_of(request).check_ready()
    return json_response({"status": "ok"})


async def version(request: Request) -> Response:
    """The version of Ramet."""
    return json_response({"version": package_version("ramet")})


async def metrics(request: Request) -> Response:
    """All metrics, in Prometheus' text form."""
    body = await state_of(request).metrics.exposition()
    return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")


async def models(request: Request) -> Response:
    """The model under each of its names."""
    state = state_of(request)
    state.check_ready()
    return json_response({"object": "list", "data": [_model(state, name) for name in state.names]})


async def model(request: Request) -> Response:
    """One model."""
    state, name = state_of(request), request.path_params["name"]
    state.check_ready()
    state.check_model(name)
    return json_response(_model(state, name))


def _model(state: ServerState, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "ramet",
        "root": state.names[0],
        "parent": None,
        "max_model_len": state.llm.max_model_len,
    }


async def pause(request: Request) -> Response:
    """Make no more steps; answers when the pause has taken hold."""
    state = state_of(request)
    state.check_ready()
    body = await read_json(request, max_bytes=state.config.max_body_bytes, optional=True)
    fields = PAUSE.check({**request.query_params, **body}, unknown=state.config.unknown_fields)
    mode = fields.get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise ApiError(400, f"mode is {shown(mode)}; allowed: {', '.join(PAUSE_MODES)}.", param="mode")
    await state.llm.pause(mode)
    return json_response({"status": "paused", "mode": mode})


async def resume(request: Request) -> Response:
    """Go on after a pause."""
    state = state_of(request)
    state.check_ready()
    await state.llm.resume()
    return json_response({"status": "running"})


async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix that is not in use."""
    state = state_of(request)
    state.check_ready()
    return json_response({"pages_freed": await state.llm.reset_prefix_cache()})


async def abort_requests(request: Request) -> Response:
    """End requests by their ids, which are those of their answers or the ``X-Request-Id`` they were sent with."""
    state = state_of(request)
    state.check_ready()
    body = await read_json(request, max_bytes=state.config.max_body_bytes)
    fields = ABORT.check(body, unknown=state.config.unknown_fields)
    ids = fields.get("request_ids", [])
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise ApiError(400, f"request_ids is {shown(ids)}; allowed: a list of ids.", param="request_ids")
    if flag(fields, "all"):
        ids = list(state.under_way)
    elif not ids:
        raise ApiError(400, "request_ids is missing; give ids, or 'all': true.", param="request_ids")
    aborted: list[str] = []
    unknown: list[str] = []
    for name in ids:
        known = [i for i in (name, f"cmpl-{name}", f"chatcmpl-{name}") if i in state.under_way]
        for public_id in known:
            await state.abort(public_id)
        (aborted if known else unknown).append(name)
    return json_response({"aborted": aborted, "unknown": unknown})


async def missing(request: Request) -> Response:
    """501: the engine can't do that yet."""
    path = request.url.path
    raise ApiError(501, f"{path} is not implemented: {MISSING[path]}.", code="not_implemented")
