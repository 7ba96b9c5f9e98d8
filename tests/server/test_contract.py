"""The official client: n, streams, usage, log-probabilities and stop strings in every combination."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from serving import Server

GRID = list(itertools.product((1, 2, 64), (False, True), (False, True), (None, 2), (None, "E")))


@pytest.mark.parametrize(("n", "stream", "usage", "logprobs", "stop"), GRID)
def test_completions(tiny: Server, n: int, stream: bool, usage: bool, logprobs: int | None, stop: str | None) -> None:
    request: dict[str, Any] = dict(
        model="tiny", prompt="hello", n=n, seed=3, max_tokens=6, logprobs=logprobs, stop=stop
    )
    whole = tiny.client.completions.create(**request)
    assert [c.index for c in whole.choices] == list(range(n))
    assert whole.usage is not None
    if not stream:
        assert whole.usage.prompt_tokens == 5
        assert whole.usage.total_tokens == 5 + whole.usage.completion_tokens
        for choice in whole.choices:
            assert choice.finish_reason in ("stop", "length")
            assert stop is None or stop not in choice.text
            assert (choice.logprobs is None) == (logprobs is None)
        return
    options = {"stream_options": {"include_usage": True}} if usage else {}
    texts, ends, logs, usages = [""] * n, [0] * n, [0] * n, []
    for chunk in tiny.client.completions.create(**request, stream=True, **options):
        if chunk.usage is not None:
            assert not chunk.choices
            usages.append(chunk.usage)
        for choice in chunk.choices:
            assert not ends[choice.index], "something came behind the last part"
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
            logs[choice.index] += len(choice.logprobs.tokens or ()) if choice.logprobs else 0
    assert texts == [c.text for c in whole.choices]
    assert ends == [1] * n
    assert len(usages) == usage
    if usage:
        assert usages[0].completion_tokens == whole.usage.completion_tokens
        assert usages[0].prompt_tokens == 5
    if logprobs is not None:
        assert logs == [len(c.logprobs.tokens or ()) for c in whole.choices if c.logprobs]


@pytest.mark.parametrize(("n", "stream", "logprobs"), list(itertools.product((1, 2, 64), (False, True), (False, True))))
def test_chats(tiny: Server, n: int, stream: bool, logprobs: bool) -> None:
    request: dict[str, Any] = dict(
        model="tiny", messages=[{"role": "user", "content": "hi"}], n=n, seed=3, max_tokens=5, logprobs=logprobs
    )
    if logprobs:
        request["top_logprobs"] = 2
    whole = tiny.client.chat.completions.create(**request)
    assert [c.index for c in whole.choices] == list(range(n))
    if not stream:
        for choice in whole.choices:
            assert choice.message.role == "assistant"
            if logprobs:
                assert choice.logprobs and choice.logprobs.content
                assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        return
    texts, ends, roles = [""] * n, [0] * n, [0] * n
    for chunk in tiny.client.chat.completions.create(**request, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
        ends[choice.index] += choice.finish_reason is not None
    assert texts == [c.message.content for c in whole.choices]
    assert ends == roles == [1] * n


def test_models_and_tokens(tiny: Server) -> None:
    (model,) = tiny.client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 2048)  # type: ignore[attr-defined]
    assert tiny.client.models.retrieve("tiny").id == "tiny"
    told = tiny.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == 3
    assert tiny.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "hé"}
    chat = tiny.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
    assert tiny.post("/detokenize", {"tokens": chat}).json() == {"prompt": "<user>x\n<assistant>"}
    assert set(tiny.get("/version").json()) == {"version"}


def test_variables_of_the_chat_template(tiny: Server) -> None:
    def rendered(**fields: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        return tiny.post("/detokenize", {"tokens": tiny.post("/tokenize", body).json()["tokens"]}).json()["prompt"]

    assert rendered(chat_template_kwargs={"think": True}) == "<user>x\n<assistant><think>"
    assert rendered(chat_template_kwargs={"think": True}, add_generation_prompt=False) == "<user>x\n<think>"
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    extra = {"chat_template_kwargs": {"think": True}, "return_token_ids": True}
    answer = tiny.client.chat.completions.create(**asked, extra_body=extra)
    assert answer.usage and answer.usage.prompt_tokens == len("<user>x\n<assistant><think>")
    for wrong in ("think", {"messages": []}):
        refused = tiny.post("/v1/chat/completions", {**asked, "chat_template_kwargs": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"


def test_batches_of_prompts_and_token_ids_in_and_out(tiny: Server) -> None:
    ids = tiny.post("/tokenize", {"prompt": "hello"}).json()["tokens"]
    asked = dict(n=2, seed=5, max_tokens=4, return_token_ids=True)
    by_text = tiny.complete(prompt=["hello", "other"], **asked)
    by_ids = tiny.complete(prompt=[ids, tiny.post("/tokenize", {"prompt": "other"}).json()["tokens"]], **asked)
    assert [c["index"] for c in by_text["choices"]] == [0, 1, 2, 3]
    assert [c["token_ids"] for c in by_text["choices"]] == [c["token_ids"] for c in by_ids["choices"]]
    assert by_ids["choices"][0]["prompt_token_ids"] == ids
    assert by_text["usage"]["prompt_tokens"] == 10


def test_echo_with_logprobs_as_harnesses_ask(tiny: Server) -> None:
    ids = [40, 41, 42, 43]
    first, second = tiny.complete(prompt=[ids, ids[:3]], echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"]
    for choice, count in ((first, 4), (second, 3)):
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == count + 1
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert all(value <= 0 for value in found["token_logprobs"][1:])
    assert first["logprobs"]["token_logprobs"][:3] == pytest.approx([None, *second["logprobs"]["token_logprobs"][1:3]])


def test_prompt_logprobs_are_the_same_on_a_warm_and_a_cold_cache(tiny: Server) -> None:
    tiny.post("/reset_prefix_cache")
    asked: dict[str, Any] = dict(prompt="warm or cold", max_tokens=1, prompt_logprobs=1, temperature=0)
    cold, warm = (tiny.complete(**asked)["choices"][0]["prompt_logprobs"] for _ in range(2))
    assert cold == warm and cold[0] is None and len(cold) == 12


def test_structured_outputs(tiny: Server) -> None:
    asked: dict[str, Any] = dict(prompt="x", n=8, seed=1, max_tokens=40)
    found = tiny.complete(**asked, structured_outputs={"choice": ["yes", "no"]})["choices"]
    assert {c["text"] for c in found} <= {"yes", "no"} and {c["finish_reason"] for c in found} == {"stop"}
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    chat = tiny.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            "max_tokens": 60,
            "logit_bias": {str(i): -100 for i in tiny.post("/tokenize", {"prompt": " \n\t\r"}).json()["tokens"]},
        },
    ).json()
    assert chat["choices"][0]["message"]["content"].replace(" ", "") in ('{"a":1}', '{"a":2}')
    bad = tiny.post("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(a"}})
    assert bad.status_code == 400 and "not closed" in bad.json()["error"]["message"]


def test_first_k_of_n_ends_the_others(tiny: Server) -> None:
    choices = tiny.complete(prompt="abc", n=8, first_k=3, max_tokens=400, seed=2, temperature=1.5)["choices"]
    done = [c for c in choices if c["finish_reason"] != "abort"]
    assert len(done) >= 3
    assert len(choices) == 8


def test_a_partial_rollout_goes_on_from_its_token_ids(tiny: Server) -> None:
    asked: dict[str, Any] = dict(n=3, max_tokens=12, return_token_ids=True, ignore_eos=True)
    whole = tiny.complete(prompt="again", **asked)["choices"]
    for choice in whole:
        prompt = choice["prompt_token_ids"] + choice["token_ids"][:5]
        (rest,) = tiny.complete(
            prompt=prompt,
            max_tokens=7,
            return_token_ids=True,
            ignore_eos=True,
            seed=choice["seed"],
            first_sample_id=choice["sample_id"],
        )["choices"]
        assert rest["token_ids"] == choice["token_ids"][5:]


def test_a_partial_rollout_of_a_stream_goes_on_in_another(tiny: Server) -> None:
    asked: dict[str, Any] = dict(n=3, max_tokens=12, return_token_ids=True, ignore_eos=True)
    tokens: list[list[int]] = [[], [], []]
    seeds: set[int] = set()
    prompt: list[int] = []
    for event in tiny.events(prompt="again", **asked):
        (choice,) = event["choices"]
        prompt = choice.get("prompt_token_ids", prompt)
        tokens[choice["index"]] += choice.get("token_ids", [])
        seeds |= {choice["seed"]} if "seed" in choice else set()
    assert [len(ids) for ids in tokens] == [12] * 3
    (seed,) = seeds  # one for all samples; the sample id tells them apart
    for k, ids in enumerate(tokens):
        resumed = {**asked, "n": 1, "max_tokens": 7, "seed": seed, "first_sample_id": k}
        rest = [e["choices"][0] for e in tiny.events(prompt=prompt + ids[:5], **resumed)]
        assert [i for choice in rest for i in choice.get("token_ids", [])] == ids[5:]


def test_first_k_of_n_in_a_stream_ends_every_choice_once(tiny: Server) -> None:
    events = tiny.events(prompt="abc", n=8, first_k=3, max_tokens=400, seed=2, temperature=1.5)
    ends = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(index for index, _ in ends) == list(range(8))
    assert sum(reason != "abort" for _, reason in ends) >= 3
