"""Runs the server from the first connection to the last: loads the model, serves, ends in good order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import uvicorn

from ramet.async_llm import AsyncLLM
from ramet.errors import InvalidArgument
from ramet.server.app import make_app
from ramet.server.config import ServerConfig
from ramet.server.progress import log_progress
from ramet.server.state import ServerState

log = logging.getLogger(__name__)

_BACKLOG = 2048
_LAST_SECONDS = 5
"""What answers get to reach their clients when all requests have ended."""


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to us: we end requests in good order before the connections."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(llm: AsyncLLM, config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends requests under way at once.

    Parameters
    ----------
    llm : AsyncLLM
        Not started yet.
    config : ServerConfig

    Raises
    ------
    InvalidArgument
        The address can't be listened on.
    RametError
        As :meth:`AsyncLLM.start` says it.
    """
    with bound_socket(config) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_until_signalled(llm, config, listener))


async def _until_signalled(llm: AsyncLLM, config: ServerConfig, listener: socket.socket) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        else:
            log.info("the server ends when requests under way have; once more ends them at once")
        stop.set()

    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
            stack.callback(loop.remove_signal_handler, number)
        await serve(llm, config, listener, stop=stop, hurry=hurry)


async def serve(
    llm: AsyncLLM, config: ServerConfig, listener: socket.socket, *, stop: asyncio.Event, hurry: asyncio.Event
) -> None:
    """Serve on a bound socket until told to stop.

    Connections are taken from the beginning; until the model is loaded they are answered with status 503.

    Parameters
    ----------
    llm : AsyncLLM
        Not started yet; closed at the end.
    config : ServerConfig
    listener : socket
    stop, hurry : asyncio.Event
        Set by the caller: end when requests under way have ended; end them at once.
    """
    state = ServerState(llm, config)
    server = _Uvicorn(
        uvicorn.Config(
            make_app(state),
            lifespan="off",
            ws="none",
            log_config=None,
            log_level="critical",  # failures have their line from us
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_LAST_SECONDS,
        )
    )
    serving = asyncio.create_task(server.serve([listener]))
    progress = asyncio.create_task(log_progress(state))
    try:
        if await _unless(stop, _start(llm, listener)):
            await stop.wait()
        if not await _unless(hurry, state.finish()):
            await state.abort_all()
    finally:
        progress.cancel()
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await serving
        await llm.close()


async def _start(llm: AsyncLLM, listener: socket.socket) -> None:
    await llm.start()
    host, port = listener.getsockname()[:2]
    log.info("ready: %s on http://%s:%d", llm.config.model, f"[{host}]" if ":" in host else host, port)


async def _unless(event: asyncio.Event, work: Awaitable[None]) -> bool:
    """Do some work; False if the event came before its end and it was given up."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return task.done()
    finally:
        for other in (task, watcher):
            if not other.done():
                other.cancel()
                with suppress(asyncio.CancelledError):
                    await other


@contextmanager
def bound_socket(config: ServerConfig) -> Iterator[socket.socket]:
    """Yield a socket that listens where the settings say.

    Raises
    ------
    InvalidArgument
        That is not possible.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgument(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another --host or --port."
        ) from None
    with listener:
        yield listener


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    if os.name == "nt":
        return None
    import uvloop

    return uvloop.new_event_loop
