"""Random mixes of requests in a tiny pool give each request what it gets alone, and leave nothing behind."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from forest_checks import check_forest
from harness import assert_all_free, near_tie, request, run, tiny_engine, tiny_model

from ramet.engine.engine import Engine
from ramet.engine.group import GroupEvent, GroupRequest, SampleEvent, SampleLog

VOCAB, LONGEST = 96, 68


class Answer(NamedTuple):
    """A finished sample."""

    log: SampleLog
    finish_reason: str | None
    stop_reason: str | int | None


Answers = dict[tuple[str, int], Answer]


def random_request(rng: np.random.Generator, name: str, trunk: list[int]) -> GroupRequest:
    """A prompt that often shares a prefix, with parameters of every kind."""
    prompt = trunk[: rng.integers(0, len(trunk))] + rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()

    def sometimes(value: Any, otherwise: Any = None, chance: float = 0.3) -> Any:
        return value if rng.random() < chance else otherwise

    max_tokens = int(rng.integers(1, 20))
    made = request(
        name,
        prompt,
        seed=int(rng.integers(2**32)),
        n=int(rng.choice([1, 1, 2, 3, 9])),
        max_tokens=max_tokens,
        min_tokens=sometimes(min(max_tokens, 3), 0),
        temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
        top_p=sometimes(0.8, 1.0),
        top_k=sometimes(20, -1),
        min_p=sometimes(0.02, 0.0),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(0.4, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        logit_bias=sometimes({int(rng.integers(VOCAB)): 4.0}),
        allowed_token_ids=sometimes(list(range(0, VOCAB, 2)), chance=0.1),
        stop_token_ids=rng.integers(0, VOCAB, rng.integers(0, 4)).tolist(),
        logprobs=sometimes(int(rng.integers(0, 4))),
        prompt_logprobs=sometimes(int(rng.integers(0, 3)), chance=0.1),
        cache_salt=sometimes("salt", chance=0.1),
    )
    return replace(made, first_sample_id=int(sometimes(5, 0)))


@lru_cache
def roomy() -> Engine:
    """Where requests run alone; nothing is cached between them."""
    return tiny_engine(pages=600, max_num_seqs=16, enable_prefix_caching=False)


def alone(r: GroupRequest) -> Answers:
    finals: dict[tuple[str, int], SampleEvent] = {}
    run(roomy(), [r], finals=finals)
    return {key: Answer(e.log, e.finish_reason, e.stop_reason) for key, e in finals.items()}


def fork_of(rng: np.random.Generator, r: GroupRequest, answer: Answer, name: str) -> GroupRequest:
    """New samples from a place in an answer, under its seed with new sample ids, as ``LLM.fork`` asks for them."""
    tokens = np.concatenate([r.prompt_token_ids, answer.log.token_ids])
    position = int(rng.integers(1, len(tokens) + 1))
    return replace(
        r, request_id=name, prompt_token_ids=tokens[:position], first_sample_id=r.first_sample_id + r.params.n
    )


def mixed(rng: np.random.Generator, engine: Engine, count: int) -> tuple[dict[str, GroupRequest], Answers]:
    """Add requests bit by bit, abort and fork some; returns all requests and the answers of their samples."""
    trunk = rng.integers(0, VOCAB, 40).tolist()
    requests: dict[str, GroupRequest] = {}
    answers: Answers = {}
    scores: dict[str, Any] = {}
    forks = steps = 0
    while engine.has_unfinished or len(requests) < count + forks:
        while len(requests) < count + forks and rng.random() < 0.5:
            r = random_request(rng, f"r{len(requests)}", trunk)
            requests[r.request_id] = r
            engine.add(r)
        if engine.groups and rng.random() < 0.03:
            name = list(engine.groups)[rng.integers(len(engine.groups))]
            engine.abort(name, None if rng.random() < 0.5 else int(rng.integers(requests[name].params.n)))
        for event in engine.step():
            if isinstance(event, GroupEvent):
                scores[event.request_id] = event.prompt_logprobs
            elif event.finish_reason is not None:
                answer = Answer(event.log, event.finish_reason, event.stop_reason)
                answers[event.request_id, event.index] = answer
                if rng.random() < 0.1 and forks < 8:
                    forks += 1
                    r = fork_of(rng, requests[event.request_id], answer, f"f{forks}")
                    requests[r.request_id] = r
                    engine.add(r)
        check_forest(engine.forest)
        steps += 1
        assert steps < 20_000
    assert set(scores) == set(requests)
    return requests, answers


def assert_answer(r: GroupRequest, index: int, got: Answer, expected: Answer) -> int:
    """One sample is that of the request alone, or a part of it if it was aborted; returns 1 for a near-tie."""
    tokens, whole = got.log.token_ids.tolist(), expected.log.token_ids.tolist()
    aborted = got.finish_reason == "abort"
    if tokens != (whole[: len(tokens)] if aborted else whole):
        _, loaded = tiny_model()
        assert near_tie(loaded, r, index, whole, tokens), (r.request_id, index, tokens, whole)
        return 1
    if not aborted:
        assert (got.finish_reason, got.stop_reason) == (expected.finish_reason, expected.stop_reason)
    for column, other in zip(got.log[1:], expected.log[1:], strict=True):
        if not tokens:
            continue  # ended before anything could be recorded
        assert (column is None) == (other is None)
        if column is not None and other is not None and column.dtype.kind == "f":
            np.testing.assert_allclose(column, other[: len(column)], rtol=0, atol=1e-3)
    return 0


@pytest.mark.parametrize("seed", range(10))
def test_every_request_gets_what_it_gets_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([2, 4]))
    engine = tiny_engine(
        pages=LONGEST // page_size + 2 + int(rng.integers(4)),  # room for one longest sequence, and little more
        page_size=page_size,
        max_num_seqs=int(rng.integers(8, 17)),
        max_num_batched_tokens=int(rng.integers(17, 60)),
        max_model_len=LONGEST,
        enable_prefix_caching=bool(rng.random() < 0.7),
    )
    requests, answers = mixed(rng, engine, count=24)
    ties = tokens = 0
    for r in requests.values():
        expected = alone(r)
        assert {k for name, k in answers if name == r.request_id} == set(range(r.params.n))
        for k in range(r.params.n):
            tokens += len(expected[r.request_id, k].log.token_ids)
            ties += assert_answer(r, k, answers[r.request_id, k], expected[r.request_id, k])
    assert ties <= 1, f"{ties} near-ties in {tokens} tokens"
    assert engine.stats.preemptions > 0
    assert_all_free(engine)
