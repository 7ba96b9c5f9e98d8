"""The real model over HTTP, its engine in a process of its own: golden tokens, and what the offline engine gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server

from ramet.async_llm import AsyncLLM

pytestmark = pytest.mark.model
GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2_135m_greedy_fp32.json"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    llm = AsyncLLM("smollm2-135m", dtype="float32", kv_cache_memory_bytes=256 << 20, num_threads=1)
    made = Server(llm, served_model_name=["smollm2"]).wait_ready(120)
    yield made
    made.close()


def test_greedy_answers_over_http_are_the_golden_tokens(server: Server) -> None:
    items: list[dict[str, Any]] = json.loads(GOLDEN.read_text())["items"][:4]
    count = 16
    answer = server.complete(
        model="smollm2",
        prompt=[item["prompt_token_ids"] for item in items],
        temperature=0,
        max_tokens=count,
        ignore_eos=True,
        return_token_ids=True,
    )
    for item, choice in zip(items, answer["choices"], strict=True):
        assert choice["token_ids"] == item["greedy_token_ids"][:count]


def test_a_chat_in_the_words_of_the_official_client(server: Server) -> None:
    chat = next(item for item in json.loads(GOLDEN.read_text())["items"] if item["kind"] == "chat")
    told = server.post("/tokenize", {"messages": [{"role": "user", "content": chat["prompt"]}]}).json()
    assert told["tokens"] == chat["prompt_token_ids"]
    answer = server.client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": chat["prompt"]}], n=4, max_tokens=8, seed=1
    )
    assert len({c.message.content for c in answer.choices}) > 1
    assert answer.usage and answer.usage.prompt_tokens == len(chat["prompt_token_ids"])


def test_json_of_a_schema_from_the_real_vocabulary(server: Server) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    answer = server.complete(
        prompt="Ada is 36 years old. As JSON: ", n=4, max_tokens=40, seed=2, structured_outputs={"json": schema}
    )
    whole = [c for c in answer["choices"] if c["finish_reason"] == "stop"]
    assert whole and all(isinstance(json.loads(c["text"])["age"], int) for c in whole)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_of_two_samples_is_what_the_whole_answer_is(server: Server, logprobs: int | None) -> None:
    request: dict[str, Any] = dict(
        model="smollm2", prompt="Once upon a time", n=2, seed=5, max_tokens=24, logprobs=logprobs
    )
    whole = server.client.completions.create(**request)
    assert whole.choices[0].text != whole.choices[1].text
    texts, values, ends = ["", ""], [[], []], [0, 0]
    for chunk in server.client.completions.create(**request, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        values[choice.index] += (choice.logprobs and choice.logprobs.token_logprobs) or []
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [c.text for c in whole.choices] and ends == [1, 1]
    if logprobs is not None:
        for found, expected in zip(values, whole.choices, strict=True):
            assert found == pytest.approx(expected.logprobs.token_logprobs, abs=1e-4)
