"""Where the engine lives: a process of its own, or a thread. Both tell at once when it ends."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import zmq

from ramet import logs
from ramet.config import EngineConfig
from ramet.frontend.build import build
from ramet.service import messages as m
from ramet.service.loop import EngineLoop
from ramet.service.main import connect

log = logging.getLogger(__name__)

_LAST_LINES = 20
"""Lines of the engine's log that a report of its death repeats."""

OnExit = Callable[[str], None]
"""Called once, from another thread, with how the engine ended."""


class EngineHost(Protocol):
    """Starts an engine that connects to an address, and ends it."""

    def start(self, config: EngineConfig, address: str, on_exit: OnExit) -> None: ...

    def close(self, timeout: float) -> None:
        """Wait for the end that was asked for; force it after ``timeout`` seconds."""

    @property
    def last_lines(self) -> list[str]:
        """What the engine logged last."""


class ProcessHost:
    """The engine in a process of its own.

    Attributes
    ----------
    process : subprocess.Popen or None
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._reader: threading.Thread | None = None

    @property
    def last_lines(self) -> list[str]:
        return list(self._lines)

    def start(self, config: EngineConfig, address: str, on_exit: OnExit) -> None:
        job = {"config": dataclasses.asdict(config), "address": address, "logs": _log_settings()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ramet.service.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": _python_path()},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        self._reader = threading.Thread(target=self._follow, args=(self.process,), daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, args=(self.process, on_exit), daemon=True).start()

    def close(self, timeout: float) -> None:
        process = self.process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            log.warning("the engine's process did not end within %.0f s and is killed", timeout)
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join(1.0)

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Repeat what the process writes, and remember the end of it."""
        assert process.stdout is not None
        with process.stdout as lines:
            for data in lines:
                line = data.decode("utf-8", "replace").rstrip("\n")
                self._lines.append(line)
                print(line, file=sys.stderr, flush=True)

    def _watch(self, process: subprocess.Popen[bytes], on_exit: OnExit) -> None:
        code = process.wait()
        if self._reader is not None:
            self._reader.join(0.5)  # its last lines; a child of its own may hold the pipe open
        on_exit(_how(code))


def _how(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def _log_settings() -> dict[str, bool]:
    """The settings of this process's log, for another's."""
    level = logs.LOGGER.getEffectiveLevel()
    as_json = any(isinstance(handler.formatter, logs.JsonFormatter) for handler in logs.LOGGER.handlers)
    return {"quiet": level > logging.INFO, "verbose": level <= logging.DEBUG, "as_json": as_json}


def _python_path() -> str:
    """The path for modules, with the place of this very package in front."""
    own = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH")
    return own if not rest else own + os.pathsep + rest


class ThreadHost:
    """The engine in a thread of this process: for tests and small tools, since both sides then share one interpreter.

    Attributes
    ----------
    loop : EngineLoop or None
        Once it runs.
    """

    def __init__(self) -> None:
        self.loop: EngineLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def last_lines(self) -> list[str]:
        return []

    def start(self, config: EngineConfig, address: str, on_exit: OnExit) -> None:
        self._thread = threading.Thread(target=self._run, args=(config, address, on_exit), daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self, config: EngineConfig, address: str, on_exit: OnExit) -> None:
        context = zmq.Context()
        socket = connect(context, address)
        how = "its thread ended"
        try:
            try:
                built = build(config)
            except Exception as error:
                socket.send(m.encode(m.Failed(type(error).__name__, " ".join(str(error).split()))))
                return
            self.loop = EngineLoop(built, socket)
            self.loop.run()
        except Exception as error:
            log.exception("the engine ends because of an error")
            how = f"its thread ended: {type(error).__name__}: {error}"
        finally:
            socket.close(linger=1000)
            context.term()
            on_exit(how)


class Way:
    """The way to an engine: an address that only this user can reach, and a bound socket.

    Attributes
    ----------
    address : str
    """

    def __init__(self, context: Any) -> None:
        self._folder = tempfile.mkdtemp(prefix="ramet-")  # readable by its owner alone, and so is what lies in it
        self.address = f"ipc://{self._folder}/engine"
        self.socket: Any = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.SNDHWM, 0)  # commands never block; how many there are is bounded by admission
        self.socket.bind(self.address)

    def close(self) -> None:
        """Close the socket and remove the address."""
        self.socket.close(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)
