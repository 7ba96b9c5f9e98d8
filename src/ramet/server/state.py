"""What the endpoints share: the engine, the settings, who is admitted, and the ids of requests under way."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from starlette.requests import Request

from ramet.async_llm import AsyncLLM
from ramet.errors import nearest, shown
from ramet.server.config import ServerConfig
from ramet.server.errors import ApiError
from ramet.server.metrics import Metrics

RETRY_AFTER = "1"
"""Seconds; a queue that is full moves with every sample that ends."""


class ServerState:
    """The server's state; one per app.

    Parameters
    ----------
    llm : AsyncLLM
        Started by the app's lifespan.
    config : ServerConfig

    Attributes
    ----------
    names : tuple of str
        Under which clients ask for the model.
    stopping : bool
        The server was asked to end: nothing new is admitted.
    open_samples : int
        Of all admitted requests.
    under_way : dict
        A request's public id to the engine's ids of its prompts.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        self.names = tuple(config.served_model_name) or (llm.config.model,)
        self.metrics = Metrics(llm, self.names[0])
        self.created = int(time.time())
        self.stopping = False
        self.open_samples = 0
        self.under_way: dict[str, list[str]] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def check_model(self, name: Any) -> None:
        """Refuse a request for another model; without a name it is for this one."""
        if name is not None and name not in self.names:
            hint = nearest(name, self.names) if isinstance(name, str) else "."
            raise ApiError(
                404,
                f"there is no model {shown(name)}{hint} This server has: {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )

    def check_ready(self) -> None:
        """Refuse requests while the engine can't serve any."""
        if self.llm.death is not None:
            raise ApiError(503, "the engine has ended; the server's log tells why. Restart the server.")
        if self.stopping:
            raise ApiError(503, "the server is shutting down.", headers={"Retry-After": "5"})
        if not self.llm.is_ready:
            raise ApiError(503, "the model is being loaded.", headers={"Retry-After": "5"})

    @contextmanager
    def admitted(self, public_id: str, engine_ids: Sequence[str], samples: int) -> Iterator[None]:
        """Count a request's samples while it lasts.

        A group is admitted whole or not at all. One that is larger than the queue is admitted when nothing else is
        there, so that everything within ``max_n`` can be served.

        Raises
        ------
        ApiError
            429 when they don't fit the queue, 503 when nothing can be served.
        """
        self.check_ready()
        room = self.llm.max_num_seqs + self.config.max_queue - self.open_samples
        if samples > room and self.open_samples:
            raise ApiError(
                429,
                f"the queue has room for {max(room, 0)} samples and the request has {samples}; try again later, or "
                "raise --max-queue.",
                code="queue_full",
                headers={"Retry-After": RETRY_AFTER},
            )
        if public_id in self.under_way:
            raise ApiError(400, f"the request id {shown(public_id)} is in use; choose another.", param="X-Request-Id")
        self.open_samples += samples
        self.under_way[public_id] = list(engine_ids)
        self.idle.clear()
        try:
            yield
        finally:
            self.open_samples -= samples
            del self.under_way[public_id]
            if not self.under_way:
                self.idle.set()

    async def abort(self, public_id: str) -> bool:
        """End a request under way; False if there is none of this id."""
        engine_ids = self.under_way.get(public_id)
        for engine_id in engine_ids or ():
            await self.llm.abort(engine_id)
        return engine_ids is not None

    async def finish(self) -> None:
        """Admit nothing more; let requests under way finish for a while, then abort them."""
        self.stopping = True
        try:
            await asyncio.wait_for(self.idle.wait(), self.config.shutdown_timeout)
        except TimeoutError:
            await self.abort_all()

    async def abort_all(self) -> None:
        """End all requests under way with what they have."""
        if self.llm.is_ready:
            for public_id in list(self.under_way):
                await self.abort(public_id)


def state_of(request: Request) -> ServerState:
    """Return the state of the app that a request came to."""
    return cast(ServerState, request.app.state.ramet)


def new_id(prefix: str, request: Request) -> str:
    """Return a public id: the caller's own from ``X-Request-Id`` behind a prefix, or a fresh one."""
    own = request.scope["state"].get("client_request_id")
    return f"{prefix}-{own or uuid.uuid4().hex}"
