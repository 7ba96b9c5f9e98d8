"""What goes wrong in servers: clients that go, that are slow, that send anything; neighbours, queues, limits."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from serving import Server, tiny_server, wait_for


def begin_and_drop(server: Server, n: int, events: int = 2) -> None:
    body = {"prompt": "drop", "n": n, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        for _ in range(events):
            next(lines)


def test_a_disconnect_in_a_stream_frees_all_samples(tiny: Server) -> None:
    begin_and_drop(tiny, n=8)
    tiny.assert_free()


def test_a_disconnect_before_the_answer_frees_all_samples(tiny: Server) -> None:
    body = {"prompt": "drop", "n": 8, "max_tokens": 1500, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(tiny.url + "/v1/completions", json=body, timeout=0.3)
    tiny.assert_free()


def connect_and_drop(server: Server, cycles: int) -> None:
    process = psutil.Process()
    for _ in range(20):
        begin_and_drop(server, n=4, events=1)
    server.assert_free()
    before = process.memory_info().rss, process.num_fds(), process.num_threads()
    for _ in range(cycles):
        begin_and_drop(server, n=4, events=1)
    server.assert_free()
    wait_for(lambda: process.num_fds() <= before[1] + 2, 5)
    assert process.memory_info().rss < before[0] + (24 << 20)
    assert process.num_threads() <= before[2] + 2


def test_connect_and_drop_leaves_everything_flat(tiny: Server) -> None:
    connect_and_drop(tiny, 100)


@pytest.mark.soak
def test_a_thousand_times_connect_and_drop(tiny: Server) -> None:
    connect_and_drop(tiny, 1000)


def test_cached_tokens_are_exact_with_many_samples(tiny: Server) -> None:
    tiny.post("/reset_prefix_cache")
    cold = tiny.complete(prompt="exactly the same", n=4, max_tokens=2)["usage"]
    warm = tiny.complete(prompt="exactly the same, and more", n=4, max_tokens=2)["usage"]
    assert cold["prompt_tokens_details"] == {"cached_tokens": 0} and cold["prompt_tokens"] == 16
    assert warm["prompt_tokens_details"] == {"cached_tokens": 16} and warm["prompt_tokens"] == 26


def test_a_stop_string_over_two_tokens_is_found_in_whole_and_streamed_answers(tiny: Server) -> None:
    asked: dict[str, Any] = dict(prompt="stop", seed=11, max_tokens=64, ignore_eos=True, allowed_token_ids=[64, 65, 66])
    text = tiny.complete(**asked)["choices"][0]["text"]
    stop = text[20:23]
    expected = text[: text.index(stop)]
    (choice,) = tiny.complete(**asked, stop=[stop])["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected, "stop", stop)
    events = tiny.events(**asked, stop=[stop])
    assert "".join(e["choices"][0]["text"] for e in events) == expected


def test_half_characters_never_come_out_of_a_stream(tiny: Server) -> None:
    ids = tiny.post("/tokenize", {"prompt": "é"}).json()["tokens"]
    asked: dict[str, Any] = dict(prompt="x", seed=1, max_tokens=40, allowed_token_ids=ids, n=2)
    whole = [c["text"] for c in tiny.complete(**asked)["choices"]]
    texts = ["", ""]
    for event in tiny.events(**asked):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == whole and "é" in whole[0]


def test_logprobs_belong_to_their_sample(tiny: Server) -> None:
    asked: dict[str, Any] = dict(
        prompt="whose", n=3, seed=4, max_tokens=5, logprobs=0, return_token_ids=True, ignore_eos=True
    )
    for choice in tiny.complete(**asked)["choices"]:
        prompt = choice["prompt_token_ids"] + choice["token_ids"]
        (scored,) = tiny.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)["choices"]
        assert scored["logprobs"]["token_logprobs"][5:] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)


def test_a_seeded_request_is_not_changed_by_neighbours(tiny: Server) -> None:
    asked: dict[str, Any] = dict(prompt="alone", n=2, seed=9, max_tokens=24, return_token_ids=True, ignore_eos=True)
    alone = [c["token_ids"] for c in tiny.complete(**asked)["choices"]]
    threads = [
        threading.Thread(target=tiny.complete, kwargs=dict(prompt=f"neighbour {i}", n=3, max_tokens=40))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    crowded = [c["token_ids"] for c in tiny.complete(**asked)["choices"]]
    for thread in threads:
        thread.join()
    assert crowded == alone


def test_prompts_that_arrive_together_are_computed_once(tiny: Server) -> None:
    tiny.post("/reset_prefix_cache")
    tiny.post("/pause", {"mode": "keep"})
    before = tiny.engine.stats.prefill_tokens
    prompt = "the same words from many clients at once"
    threads = [threading.Thread(target=tiny.complete, kwargs=dict(prompt=prompt, max_tokens=3)) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_for(lambda: tiny.llm.num_open == 8, 10)
    tiny.post("/resume")
    for thread in threads:
        thread.join()
    assert tiny.engine.stats.prefill_tokens - before == len(prompt)


def test_the_queue_admits_groups_whole_or_answers_429() -> None:
    server = tiny_server(config={"max_queue": 4}, max_num_seqs=4).wait_ready()
    try:
        server.post("/pause", {"mode": "keep"})
        big = threading.Thread(target=server.complete, kwargs=dict(prompt="big", n=6, max_tokens=3))
        big.start()
        wait_for(lambda: server.llm.num_open == 1, 10)
        refused = server.post("/v1/completions", {"prompt": "x", "n": 3})
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "queue_full"
        assert server.llm.num_open == 1, "nothing of the refused group was started"
        server.post("/resume")
        big.join()
        assert len(server.complete(prompt="x", n=50, max_tokens=2)["choices"]) == 50  # alone: in waves, not refused
        server.assert_free()
    finally:
        server.close()


LONG_NAME = "m" * 2000
"""Of a model: repeated by every event, so that the buffers between the two ends are soon full."""


@contextmanager
def reads_nothing(server: Server) -> Iterator[None]:
    """A client that asks for a long stream and takes nothing of it."""
    body = {"model": LONG_NAME, "prompt": "x", "n": 8, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    data = json.dumps(body).encode()
    kind = "Host: x\r\nContent-Type: application/json\r\nX-Request-Id: slow"
    head = f"POST /v1/completions HTTP/1.1\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        slow.sendall(head.encode() + data)
        wait_for(lambda: server.llm.num_open == 1, 10)
        yield


def test_a_slow_reader_is_aborted_and_others_are_not_held_up(caplog: pytest.LogCaptureFixture) -> None:
    server = tiny_server(config={"served_model_name": [LONG_NAME]}, max_backlog=500).wait_ready()
    try:
        with reads_nothing(server):
            assert server.complete(prompt="quick", max_tokens=3)["choices"]
            wait_for(lambda: server.llm.num_open == 0, 50)
            assert server.engine.stats.samples_finished["abort"] == 8
        (line,) = [r.getMessage() for r in caplog.records if "is aborted" in r.getMessage()]
        found = re.fullmatch(r"request cmpl-slow-0 is aborted: its reader is (\d+) tokens behind", line)
        assert found and 500 < int(found[1]) <= 508
    finally:
        server.close()


def test_a_reader_that_takes_nothing_for_too_long_is_broken_off(caplog: pytest.LogCaptureFixture) -> None:
    config = {"served_model_name": [LONG_NAME], "write_timeout": 0.2}
    server = tiny_server(config=config).wait_ready()
    try:
        with reads_nothing(server):
            wait_for(lambda: server.llm.num_open == 0, 50)
        server.assert_free()
        errors = [r.getMessage() for r in caplog.records if r.levelname in ("WARNING", "ERROR")]
        assert errors == ["request slow is broken off: ReaderTooSlow: its reader took nothing for 0.2 s"]
    finally:
        server.close()


def test_abort_by_id_keeps_what_there_is(tiny: Server) -> None:
    found: list[dict[str, Any]] = []
    body = {"prompt": "x", "n": 2, "max_tokens": 1900, "ignore_eos": True}
    thread = threading.Thread(
        target=lambda: found.append(tiny.post("/v1/completions", body, headers={"X-Request-Id": "mine"}).json())
    )
    thread.start()
    wait_for(lambda: tiny.llm.num_open == 1, 10)
    assert tiny.post("/abort_requests", {"request_ids": ["mine", "nobody"]}).json() == {
        "aborted": ["mine"],
        "unknown": ["nobody"],
    }
    thread.join()
    assert found[0]["id"] == "cmpl-mine"
    assert {c["finish_reason"] for c in found[0]["choices"]} == {"abort"}


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_no_tokens_and_one_token(tiny: Server, max_tokens: int) -> None:
    for stream in (False, True):
        asked: dict[str, Any] = dict(prompt="ends", n=2, max_tokens=max_tokens, stop=[])
        if stream:
            ends = [e["choices"][0]["finish_reason"] for e in tiny.events(**asked)]
            assert sum(end is not None for end in ends) == 2
        else:
            answer = tiny.complete(**asked)
            assert answer["usage"]["completion_tokens"] == 2 * max_tokens
            assert len(answer["choices"]) == 2


@pytest.mark.parametrize("prompt", ["😀 family 👩‍👩‍👧", "a\0b", "\u2028", "é" * 300])
def test_odd_text_comes_back_as_it_went(tiny: Server, prompt: str) -> None:
    (choice,) = tiny.complete(prompt=prompt, max_tokens=0, echo=True)["choices"]
    assert choice["text"] == prompt


def test_bodies_that_cannot_be_served(tiny: Server) -> None:
    def refused(status: int, part: str, **options: Any) -> None:
        answer = tiny.post("/v1/completions", **options)
        error = answer.json()["error"]
        assert answer.status_code == status and part in error["message"], answer.text
        assert set(error) == {"message", "type", "param", "code"} and "/work" not in answer.text

    kind = {"Content-Type": "application/json"}
    refused(400, "not valid JSON", content=b"{", headers=kind)
    refused(400, "not valid JSON", content=b'{"prompt": NaN}', headers=kind)
    refused(400, "not valid JSON", content=b'{"prompt": "\xff"}', headers=kind)
    refused(400, "nested", content=b"[" * 200_000, headers=kind)
    refused(400, "JSON object", content=b"[1]", headers=kind)
    refused(415, "content type", content=b"prompt=x", headers={"Content-Type": "text/plain"})
    refused(400, "lone surrogate", content=b'{"prompt": "\\ud800"}', headers=kind)
    refused(400, "max_model_len", body={"prompt": "x" * 1_000_000})
    refused(400, "max_model_len", body={"prompt": "x", "max_tokens": 5000})
    refused(400, "prompt is", body={"prompt": [1, "a"]})
    refused(400, "empty", body={"prompt": ""})
    refused(400, "vocabulary", body={"prompt": [100_000]})
    refused(400, "n is", body={"prompt": "x", "n": "3"})
    refused(400, "n is 0", body={"prompt": "x", "n": 0})
    refused(400, "n is", body={"prompt": "x", "n": 16_385})
    refused(400, "temperature", body={"prompt": "x", "temperature": -1})
    refused(400, "'temperature'", body={"prompt": "x", "temprature": 1})
    refused(400, "best_of", body={"prompt": "x", "best_of": 3})
    refused(400, "suffix", body={"prompt": "x", "suffix": "y"})
    refused(404, "no model", body={"prompt": "x", "model": "other"})
    too_long = tiny.post("/v1/completions", {"prompt": "x" * 3000}).json()["error"]
    assert too_long["code"] == "context_length_exceeded"
    assert tiny.post("/sleep").status_code == 501
    assert tiny.post("/update_weights").json()["error"]["type"] == "not_implemented_error"


def test_a_body_above_the_limit_and_a_missing_key() -> None:
    config = {"max_body_bytes": 1000, "api_key": ["secret"]}
    server = tiny_server(config=config).wait_ready()
    try:
        assert server.get("/v1/models").status_code == 401
        key = {"Authorization": "Bearer secret"}
        assert server.get("/v1/models", headers=key).status_code == 200
        assert server.post("/v1/completions", {"prompt": "x" * 2000}, headers=key).status_code == 413
        assert server.get("/health").status_code == 200
        assert "access-control-allow-origin" not in server.get("/health", headers={"Origin": "http://a"}).headers
    finally:
        server.close()


def test_an_error_nobody_expected_is_answered_and_logged_once(
    tiny: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> int:
        raise KeyError("broken")

    monkeypatch.setattr(tiny.llm, "reset_prefix_cache", fail)
    answer = tiny.post("/reset_prefix_cache", headers={"X-Request-Id": "odd", "Connection": "close"})
    assert answer.status_code == 500 and "request odd" in answer.json()["error"]["message"]
    assert "broken" not in answer.text
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert record.getMessage() == "request odd failed: 'broken'" and record.exc_info
