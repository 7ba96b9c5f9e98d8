"""Many mixed requests through a pool that is far too small: right tokens, nothing left behind."""

from __future__ import annotations

import numpy as np
import pytest
from forest_checks import check_forest
from harness import Answers, assert_all_free, near_tie, request, run, tiny_engine, tiny_model

from ramet.engine.group import GroupRequest


def mixed_requests(count: int, seed: int) -> list[GroupRequest]:
    """Random prompts that often share prefixes, random n, lengths, stops and temperatures."""
    rng = np.random.default_rng(seed)
    trunks = [rng.integers(0, 96, 60).tolist() for _ in range(4)]
    requests = []
    for i in range(count):
        shared = trunks[rng.integers(4)][: rng.integers(0, 60)]
        prompt = shared + rng.integers(0, 96, rng.integers(1, 12)).tolist()
        requests.append(
            request(
                f"r{i}",
                prompt,
                seed=int(rng.integers(2**32)),
                n=int(rng.choice([1, 1, 1, 2, 5, 16])),
                temperature=float(rng.choice([0.0, 0.7, 1.0, 1.5])),
                max_tokens=int(rng.integers(1, 30)),
                stop_token_ids=rng.integers(0, 96, rng.integers(0, 3)).tolist(),
                prompt_logprobs=0 if rng.random() < 0.05 else None,
                cache_salt="salt" if rng.random() < 0.1 else None,
            )
        )
    return requests


def assert_same(requests: list[GroupRequest], got: Answers, expected: Answers, *, allowed: float = 1e-4) -> None:
    """Token for token, but for near-ties, of which there may be one in 10,000 tokens."""
    _, loaded = tiny_model()
    ties = tokens = 0
    for r in requests:
        for k in range(r.params.n):
            one, other = expected[r.request_id, k], got[r.request_id, k]
            tokens += len(one)
            if one != other:
                assert near_tie(loaded, r, k, one, other), (r.request_id, k, one, other)
                ties += 1
    assert ties <= max(1, allowed * tokens), f"{ties} near-ties in {tokens} tokens"


@pytest.mark.parametrize("caching", [True, False])
def test_a_thousand_mixed_requests_in_a_starved_pool_give_the_unconstrained_tokens(caching: bool) -> None:
    requests = mixed_requests(1000, seed=1)
    expected = run(tiny_engine(pages=20_000, max_num_seqs=64), requests)
    engine = tiny_engine(pages=44, max_num_seqs=24, max_num_batched_tokens=24, enable_prefix_caching=caching)

    def check(step: int) -> None:
        if step % 50 == 0:
            check_forest(engine.forest)

    got = run(engine, requests, each_step=check)
    assert engine.stats.preemptions > 100, "the pool was not small enough to prove anything"
    assert_same(requests, got, expected)
    assert_all_free(engine)


def test_aborts_at_random_moments_leave_the_others_and_the_pool_as_they_were() -> None:
    requests = mixed_requests(300, seed=2)
    expected = run(tiny_engine(pages=20_000, max_num_seqs=64), requests)
    engine = tiny_engine(pages=40, max_num_seqs=24, max_num_batched_tokens=24)
    rng = np.random.default_rng(3)
    gone: set[str] = set()
    single: set[tuple[str, int]] = set()

    def abort_some(step: int) -> None:
        open_groups = list(engine.groups)
        if open_groups and rng.random() < 0.3:
            name = open_groups[rng.integers(len(open_groups))]
            if rng.random() < 0.5:
                gone.add(name)
                engine.abort(name)
            else:
                index = int(rng.integers(engine.groups[name].request.params.n))
                single.add((name, index))
                engine.abort(name, index)
        if step % 20 == 0:
            check_forest(engine.forest)

    finals: dict = {}
    got = run(engine, requests, each_step=abort_some, finals=finals)
    assert len(gone) > 20 and len(single) > 20
    aborted = {key for key, event in finals.items() if event.finish_reason == "abort"}
    assert aborted <= {key for key in got if key[0] in gone} | single
    assert len(got) == len(expected), "every sample is answered, aborted ones with what they have"
    untouched = [r for r in requests if r.request_id not in gone and not any(r.request_id == s for s, _ in single)]
    assert_same(untouched, got, expected)
    for key in aborted:
        assert got[key] == expected[key][: len(got[key])]
    assert_all_free(engine)
