"""A line in the log every ten seconds in which something happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Any

from ramet.errors import RametError
from ramet.server.state import ServerState

log = logging.getLogger(__name__)

INTERVAL = 10.0


async def log_progress(state: ServerState, interval: float = INTERVAL) -> None:
    """Log what the server does, until cancelled.

    Parameters
    ----------
    state : ServerState
    interval : float
        Seconds between lines.
    """
    before: Mapping[str, Any] | None = None
    delivered, since = 0, monotonic()
    while True:
        await asyncio.sleep(interval)
        if not state.llm.is_ready:
            continue
        with suppress(RametError):  # the engine's end has a line of its own
            stats = await state.llm.stats()
            now, tokens = monotonic(), state.metrics.generation_tokens
            line = progress_line(before or {}, stats, tokens - delivered, now - since)
            before, delivered, since = stats, tokens, now
            if line:
                log.info("%s", line)


def progress_line(before: Mapping[str, Any], now: Mapping[str, Any], generated: int, seconds: float) -> str | None:
    """Return the line for an interval; None if nothing happened in it.

    Parameters
    ----------
    before, now : mapping
        The engine's counters at its ends; ``before`` may be empty.
    generated : int
        Tokens delivered in it.
    seconds : float
    """

    def grown(key: str) -> int:
        return int(now[key] - before.get(key, 0))

    running, waiting = now["requests_running"], now["requests_waiting"]
    if not (running or waiting or generated or grown("prompt_tokens")):
        return None
    prompt, hits, steps = grown("prompt_tokens"), grown("cached_prompt_tokens"), grown("steps")
    return (
        f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
        f"running {running} requests ({now['samples_running']} samples), waiting {waiting}, "
        f"KV usage {now['pages_in_use'] / max(now['pages_total'], 1):.1%}, "
        f"prefix hit rate {hits / max(prompt, 1):.1%}, "
        f"shared path {grown('steps_shared') / max(steps, 1):.1%} of {steps} steps"
    )
