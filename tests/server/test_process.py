"""The engine in a process of its own: killed, failing at its start, ended in good order."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
from serving import tiny_server, wait_for
from tiny import SETTINGS, tiny_folder

from ramet.async_llm import AsyncLLM
from ramet.errors import OutOfMemory


def test_a_killed_engine_is_noticed_within_a_second_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    server = tiny_server(in_process=False)
    assert server.get("/health").status_code == 503
    server.wait_ready()
    answers: list[Any] = []
    body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body)))
    thread.start()
    wait_for(lambda: server.llm.num_open == 1, 10)
    server.llm.host.process.kill()  # type: ignore[attr-defined]
    killed = time.monotonic()
    wait_for(lambda: server.get("/health").status_code == 503, 1.0)
    thread.join(2)
    assert time.monotonic() - killed < 2
    assert answers[0].status_code == 500 and "engine ended" in answers[0].json()["error"]["message"]
    assert server.post("/v1/completions", body).status_code == 503
    assert server.get("/metrics").status_code == 200
    assert "SIGKILL" in str(server.llm.death)
    server.close()


def test_the_end_waits_for_requests_under_way_and_leaves_no_process() -> None:
    server = tiny_server(in_process=False).wait_ready()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(server.complete(prompt="x", n=2, max_tokens=200)))
    thread.start()
    wait_for(lambda: server.llm.num_open == 1, 10)
    server.close()
    thread.join(5)
    assert len(found[0]["choices"]) == 2
    assert server.llm.host.process.poll() == 0  # type: ignore[attr-defined]


def test_the_end_aborts_what_takes_too_long() -> None:
    server = tiny_server(config={"shutdown_timeout": 0.2}).wait_ready()
    found: list[Any] = []
    body = dict(prompt="x", n=8, max_tokens=1900, ignore_eos=True)
    thread = threading.Thread(target=lambda: found.append(server.complete(**body)))
    thread.start()
    wait_for(lambda: server.llm.num_open == 1, 10)
    server.close()
    thread.join(5)
    assert {c["finish_reason"] for c in found[0]["choices"]} == {"abort"}


def test_the_last_lines_of_a_dead_engine_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")  # its last words
    server = tiny_server(in_process=False).wait_ready()
    server.llm.host.process.send_signal(signal.SIGABRT)  # type: ignore[attr-defined]
    wait_for(lambda: server.llm.death is not None, 5)
    told = "its process was ended by SIGABRT; its last log lines:"
    for text in (str(server.llm.death), caplog.text):
        assert told in text and "Fatal Python error: Aborted" in text and "service/loop.py" in text
    answer = server.post("/v1/completions", {"prompt": "x"})
    assert answer.status_code == 503 and "Fatal" not in answer.text, "the log is not for clients"
    server.close()


async def _start(**settings: Any) -> None:
    async with AsyncLLM(tiny_folder(), **{**SETTINGS, **settings}):
        pass


def test_an_engine_that_cannot_start_says_why() -> None:
    import asyncio

    with pytest.raises(OutOfMemory, match="kv_cache_memory_bytes"):
        asyncio.run(_start(kv_cache_memory_bytes=1))
