"""The engine's process: ``python -m ramet.service.main``, started by :mod:`ramet.service.process` alone.

Its first line of input is the job as JSON. The input stays open as long as the front end lives: its end is the sign to
end here too, however the front end came to its own.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time

import zmq

from ramet import logs
from ramet.config import EngineConfig
from ramet.errors import RametError
from ramet.frontend.build import build
from ramet.service import messages as m
from ramet.service.loop import EngineLoop

log = logging.getLogger(__name__)

_LAST_SECONDS = 5.0
"""What a step under way may take after the front end has gone."""


def main() -> int:
    """Serve until the front end says so, or goes."""
    # Ctrl-C and a service manager's SIGTERM reach the whole group; the front end decides what they mean.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job = json.loads(sys.stdin.readline())
    logs.configure(**job["logs"])
    threading.Thread(target=_end_with_the_front_end, daemon=True).start()
    context = zmq.Context()
    socket = connect(context, job["address"])
    try:
        return _serve(job, socket)
    finally:
        socket.close(linger=1000)
        context.term()


def _serve(job: dict[str, object], socket: zmq.Socket[bytes]) -> int:
    try:
        built = build(EngineConfig(**job["config"]))  # type: ignore[arg-type]
    except Exception as error:
        if not isinstance(error, RametError):
            log.exception("the engine cannot be started")
        socket.send(m.encode(m.Failed(type(error).__name__, " ".join(str(error).split()))))
        return 1
    try:
        EngineLoop(built, socket).run()
    except Exception:
        log.exception("the engine ends because of an error")
        return 1
    return 0


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """Return the engine's end of the way to the front end."""
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    return socket


def _end_with_the_front_end() -> None:
    # Not by sys.stdin: a thread that waits in there would hold its lock when the interpreter ends.
    while os.read(0, 4096):
        pass
    time.sleep(_LAST_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
