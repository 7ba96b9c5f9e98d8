"""The application: which endpoint is where, and what goes around all of them."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from ramet.server import control
from ramet.server.chat import chat_completions
from ramet.server.completions import completions
from ramet.server.errors import ApiError
from ramet.server.gate import Gate
from ramet.server.sse import json_response
from ramet.server.state import ServerState
from ramet.server.tokens import detokenize, tokenize

GET = {
    "/v1/models": control.models,
    "/v1/models/{name:path}": control.model,
    "/health": control.health,
    "/version": control.version,
    "/metrics": control.metrics,
}
POST = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/pause": control.pause,
    "/resume": control.resume,
    "/reset_prefix_cache": control.reset_prefix_cache,
    "/abort_requests": control.abort_requests,
    **dict.fromkeys(control.MISSING, control.missing),
}


def make_app(state: ServerState) -> FastAPI:
    """Return the application. Whoever runs it starts and closes the engine.

    Parameters
    ----------
    state : ServerState
    """
    config = state.config
    app = FastAPI(title="Ramet", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.ramet = state
    for method, routes in (("GET", GET), ("POST", POST)):
        for path, endpoint in routes.items():
            app.add_route(path, endpoint, methods=[method])
    app.add_exception_handler(HTTPException, _as_openai)
    # Inside the framework's own last resort, which never gets to see an error that has no answer yet.
    app.add_middleware(Gate, api_keys=config.api_key, access_log=config.access_log)
    if config.allowed_origins:  # around the gate: a browser asks beforehand, and without a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


async def _as_openai(request: Request, error: Exception) -> Response:
    """What the framework refuses by itself: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        known = ApiError(404, f"there is no {path[:200]}; there are: {', '.join([*GET, *POST])}.", code="not_found")
    elif error.status_code == 405:
        right = "POST" if path in POST else "GET"
        known = ApiError(405, f"{path[:200]} takes {right}, not {request.method}.")
    else:
        known = ApiError(error.status_code, str(error.detail))
    return json_response(known.body(), known.status, dict(error.headers or {}))
