"""Log lines, on the logger ``ramet`` alone; the root logger is never touched."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

LOGGER = logging.getLogger("ramet")


class TextFormatter(logging.Formatter):
    """The message; a level in front of what needs attention."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"ramet: {record.levelname.lower()}: {text}"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that configuring twice replaces it and leaves an application's own handlers alone."""


def configure(*, quiet: bool = False, verbose: bool = False, as_json: bool = False) -> None:
    """Send log lines of ``ramet`` to stderr.

    Parameters
    ----------
    quiet : bool
        Warnings and errors only.
    verbose : bool
        Debug lines too.
    as_json : bool
        One JSON object a line.
    """
    for handler in [h for h in LOGGER.handlers if isinstance(h, _Handler)]:
        LOGGER.removeHandler(handler)
    handler = _Handler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG if verbose else logging.WARNING if quiet else logging.INFO)
    LOGGER.propagate = False


def configure_unless_done() -> None:
    """Send log lines to stderr unless this, or the application, has arranged for them already."""
    if not LOGGER.handlers and not logging.getLogger().handlers and LOGGER.level == logging.NOTSET:
        configure()
