"""``ramet serve``: an OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import os
from importlib.util import find_spec
from typing import Any

from ramet.cli.common import ENGINE_FIELDS, Context, add_common_options, add_engine_options, require_model
from ramet.cli.options import Parser, Settings, add_fields
from ramet.errors import InvalidArgument
from ramet.server.config import ServerConfig

USAGE = "MODEL [options]"
DESCRIPTION = (
    "Serve a model over HTTP as OpenAI does: /v1/completions, /v1/chat/completions and more; n is honoured everywhere. "
    "docs/server.md has the endpoints, fields and metrics."
)
_NEEDED = ("fastapi", "httptools", "msgspec", "prometheus_client", "uvicorn", "zmq")
KEY_VARIABLE = "RAMET_API_KEY"
SERVER_FIELDS = tuple(f.name for f in dataclasses.fields(ServerConfig))


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("Server")
    add_fields(parser, group, ServerConfig)
    add_engine_options(parser)
    add_common_options(parser)


def run(settings: Settings, context: Context) -> int:
    """Run the command."""
    require_model(settings)
    config = server_config(settings)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise InvalidArgument(f"the server needs {', '.join(missing)}; install them with pip install 'ramet[server]'.")
    context.serve(settings["model"], settings.given(ENGINE_FIELDS), config)
    return 0


def server_config(settings: Settings) -> ServerConfig:
    """Return the server's settings; a key that is not given may come from the environment."""
    given: dict[str, Any] = settings.given(SERVER_FIELDS)
    if "api_key" not in given and os.environ.get(KEY_VARIABLE):
        given["api_key"] = [os.environ[KEY_VARIABLE]]
    return ServerConfig(**given)
