"""Ctrl-C between steps: a step is never cut in the middle, so nothing it touches is left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_after() -> Iterator[None]:
    """Raise a KeyboardInterrupt that arrives inside the block at its end; a second one is raised at once.

    Does nothing outside the main thread, or where the application handles SIGINT in its own way.
    """
    own_handler = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or own_handler:
        yield
        return
    pending = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(number, frame)
        pending = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
