"""Servers for tests: the real one, over a socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import openai
from tiny import SETTINGS, tiny_folder

from ramet.async_llm import AsyncLLM
from ramet.engine.engine import Engine
from ramet.server.config import ServerConfig
from ramet.server.run import bound_socket, serve


class Server:
    """A running server; ``close`` ends it as a signal would."""

    def __init__(self, llm: AsyncLLM, **config: Any) -> None:
        self.llm = llm
        self.config = ServerConfig(host="127.0.0.1", port=0, **{"served_model_name": ["tiny"], **config})
        self._started, self.error = threading.Event(), None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)

    def _run(self) -> None:
        with bound_socket(self.config) as listener, asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._stop, self._hurry = asyncio.Event(), asyncio.Event()
            self._started.set()
            runner.run(serve(self.llm, self.config, listener, stop=self._stop, hurry=self._hurry))

    def wait_ready(self, seconds: float = 60.0) -> Server:
        wait_for(lambda: self.get("/health").status_code == 200, seconds)
        return self

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(40)
        assert not self._thread.is_alive()

    @property
    def engine(self) -> Engine:
        """The engine, where it is in this process."""
        return self.llm.host.loop.engine  # type: ignore[attr-defined]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=120)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return httpx.post(self.url + path, timeout=120, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def events(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
        """All events of a streamed answer; the last must be [DONE]."""
        with httpx.stream("POST", self.url + path, json={**body, "stream": True}, timeout=120) as answer:
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def assert_free(self) -> None:
        """Nothing is left of any request."""
        engine = self.engine
        wait_for(lambda: not engine.groups and not engine.scheduler.has_work, 10)
        wait_for(lambda: not self.llm.num_open and not self.llm._subscriptions, 10)
        assert engine.rows.tails.num_free == engine.rows.tails.num_slots
        assert engine.forest.num_available == engine.forest.pool.num_pages
        assert not self.llm.client._open and not self.llm.client._news


def wait_for(condition: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to that in time"
        time.sleep(0.01)


def tiny_server(*, in_process: bool = True, config: dict[str, Any] | None = None, **settings: Any) -> Server:
    return Server(AsyncLLM(tiny_folder(), in_process=in_process, **{**SETTINGS, **settings}), **(config or {}))
