"""``ramet serve`` as a command of its own: its flags, its log, its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import wait_for
from tiny import SETTINGS, tiny_folder


class Command:
    """The command, with the lines of its log as they come."""

    def __init__(self, *flags: str) -> None:
        settings = [text for name, value in SETTINGS.items() for text in ("--" + name.replace("_", "-"), str(value))]
        arguments = ["serve", tiny_folder(), "--host", "127.0.0.1", "--port", "0", *settings, *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ramet", *arguments], stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()
        wait_for(lambda: self._url() or self.process.poll() is not None, 60)
        self.url = self._url()
        assert self.url, self.lines

    def _follow(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))

    def _url(self) -> str:
        found = re.search(r"ready: .* on (http://[\d.:]+)", "\n".join(self.lines))
        return found[1] if found else ""

    def complete(self, **body: Any) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=body, timeout=60)

    def end(self, number: signal.Signals) -> int:
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(20)
        self._reader.join(5)
        return code


@pytest.fixture(scope="module")
def command() -> Iterator[Command]:
    made = Command("--log-json", "--unknown-fields", "warn", "--allowed-origins", "http://page.example")
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.wait()


def test_unknown_fields_are_a_warning_where_that_is_asked_for(command: Command) -> None:
    for _ in range(2):
        assert command.complete(prompt="x", max_tokens=1, temprature=1).status_code == 200
    assert command.complete(prompt="x", best_of=2).status_code == 400, "what is known and refused stays refused"
    wait_for(lambda: any("temprature" in line for line in command.lines), 5)
    (line,) = [line for line in command.lines if "temprature" in line]
    entry = json.loads(line)
    assert entry["level"] == "warning" and "'temperature'" in entry["message"]


def test_browsers_of_allowed_origins_may_call_and_others_not(command: Command) -> None:
    ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    before = httpx.options(command.url + "/v1/completions", headers=ask)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == "http://page.example"
    assert "POST" in before.headers["access-control-allow-methods"]
    answer = httpx.get(command.url + "/health", headers={"Origin": "http://page.example"})
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    refused = httpx.get(command.url + "/nothing", headers={"Origin": "http://page.example"})
    assert refused.status_code == 404, "a page must be able to read errors too"
    assert refused.headers["access-control-allow-origin"] == "http://page.example"
    other = {**ask, "Origin": "http://other.example"}
    assert httpx.options(command.url + "/v1/completions", headers=other).status_code == 400
    assert "access-control-allow-origin" not in httpx.get(command.url + "/health", headers=other).headers


def test_sigterm_ends_in_good_order_and_every_line_of_the_log_is_json(command: Command) -> None:
    answers: list[httpx.Response] = []
    body = dict(prompt="under way", n=2, max_tokens=1000, ignore_eos=True)
    thread = threading.Thread(target=lambda: answers.append(command.complete(**body)))
    thread.start()
    metrics = "ramet:num_requests_running{"
    wait_for(lambda: any(m.startswith(metrics) and m.endswith(" 1.0") for m in _metrics(command)), 10)
    assert command.end(signal.SIGTERM) == 0
    thread.join(5)
    assert {choice["finish_reason"] for choice in answers[0].json()["choices"]} == {"length"}
    entries = [json.loads(line) for line in command.lines]
    assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)
    assert any(e["logger"] == "ramet.access" and "/v1/completions 200" in e["message"] for e in entries)


def _metrics(command: Command) -> list[str]:
    return httpx.get(command.url + "/metrics").text.splitlines()


def test_an_address_that_is_taken_is_an_error_of_one_line(command_port_taken: int) -> None:
    arguments = ["serve", tiny_folder(), "--host", "127.0.0.1", "--port", str(command_port_taken)]
    found = subprocess.run([sys.executable, "-m", "ramet", *arguments], capture_output=True, text=True, timeout=60)
    assert found.returncode != 0
    assert "--port" in found.stderr and "Traceback" not in found.stderr


@pytest.fixture
def command_port_taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]
