"""What an engine's process does: read a job per line, time one call, answer with one line.

This module runs in every peer's virtual environment: standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Setup:
    """How an engine is started."""

    dtype: str  #: "float32" or "bfloat16"
    threads: int
    weights: str  #: a Hugging Face folder or a GGUF file, whichever the engine reads
    max_model_len: int


@dataclass(frozen=True)
class Job:
    """One call: n samples of a prompt, all of the same length."""

    prompt_token_ids: list[int]
    n: int
    max_tokens: int
    seed: int
    greedy: bool = False


@dataclass(frozen=True)
class Answer:
    """What one call took and gave."""

    seconds: float
    token_ids: list[list[int]]
    peak_rss_mib: float


Engine = Callable[[Job], list[list[int]]]


def peak_rss_mib() -> float:
    """Return the largest resident size this process ever had, in MiB."""
    try:  # not getrusage: on Linux a process inherits that peak from the one that started it
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except FileNotFoundError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2  # bytes on macOS


def serve(start: Callable[[Setup], tuple[Engine, dict[str, str]]]) -> None:
    """Start an engine and answer jobs from standard input until it closes.

    Parameters
    ----------
    start : callable
        Takes a `Setup`; returns the engine and the versions to report.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not mix with the replies

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    setup = Setup(**json.loads(sys.argv[1]))
    begin = time.perf_counter()
    engine, versions = start(setup)
    reply({"load_seconds": time.perf_counter() - begin, "versions": versions})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        begin = time.perf_counter()
        token_ids = engine(job)
        seconds = time.perf_counter() - begin
        reply(asdict(Answer(seconds, [list(map(int, ids)) for ids in token_ids], peak_rss_mib())))
