"""Log-probabilities of samples and prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramet.errors import InvalidArgument
from ramet.sampling.logprobs import largest_ids, prompt_logprobs
from ramet.sampling.sampler import SampleBatch, SampledTokens, Sampler
from ramet.sampling.state import SamplingState
from ramet.sampling_params import SamplingParams


def log_softmax(z: np.ndarray) -> np.ndarray:
    """In float64."""
    z = z.astype(np.float64)
    return z - z.max(-1, keepdims=True) - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))


def sample(logits: np.ndarray, mode: str, *params: SamplingParams) -> SampledTokens:
    """One row per parameter set, all from their own row of logits."""
    rows = len(params)
    state = SamplingState(rows, logits.shape[1])
    for slot, p in enumerate(params):
        state.admit(np.array([slot]), p, 11, np.array([slot]), np.arange(4))
    index = np.arange(rows)
    batch = SampleBatch(index, index, index + 4, np.zeros(rows, dtype=np.int32))
    return Sampler(state, logprobs_mode=mode).sample(torch.from_numpy(logits), batch)  # type: ignore[arg-type]


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 3, (6, 3001)).astype(np.float32)


ALL_KINDS = (
    SamplingParams(temperature=0.5, logprobs=4),
    SamplingParams(temperature=0.0, logit_bias={5: 100.0}, logprobs=4),
    SamplingParams(top_k=3, logprobs=5),
    SamplingParams(top_p=0.5, temperature=2.0, logprobs=2),
    SamplingParams(logprobs=0),
    SamplingParams(),
)


def test_raw_logprobs_are_those_of_the_untouched_logits(logits: np.ndarray) -> None:
    got, want = sample(logits, "raw_logprobs", *ALL_KINDS), log_softmax(logits)
    assert got.logprobs is not None and got.ranks is not None and got.top is not None
    for i, p in enumerate(ALL_KINDS):
        token = got.token_ids[i]
        if p.logprobs is None:
            assert np.isnan(got.logprobs[i]) and got.ranks[i] == -1
            continue
        assert got.logprobs[i] == pytest.approx(want[i, token], abs=2e-5)
        assert got.ranks[i] == (1 + (logits[i] > logits[i, token]).sum() if p.logprobs else -1)
    assert got.top.rows.tolist() == [0, 1, 2, 3] and got.top.token_ids.shape == (4, 5)
    for row in got.top.rows:
        k = ALL_KINDS[row].logprobs
        order = np.argsort(-logits[row], kind="stable")[:k]
        assert got.top.token_ids[row].tolist() == [*order.tolist(), *[-1] * (5 - k)]  # type: ignore[operator]
        assert got.top.logprobs[row, :k] == pytest.approx(want[row, order], abs=2e-5)


def test_processed_logprobs_are_those_of_what_was_drawn_from(logits: np.ndarray) -> None:
    got = sample(logits, "processed_logprobs", *ALL_KINDS)
    assert got.logprobs is not None and got.ranks is not None and got.top is not None
    assert got.logprobs[0] == pytest.approx(log_softmax(logits[0] / 0.5)[got.token_ids[0]], abs=5e-5)
    biased = logits[1].copy()
    biased[5] += 100  # a greedy row: edited logits, temperature 1
    assert got.token_ids[1] == 5 and got.ranks[1] == 1
    assert got.top.logprobs[1, :4] == pytest.approx(log_softmax(biased)[np.argsort(-biased)[:4]], abs=5e-5)
    three = np.argsort(-logits[2])[:3]
    assert got.top.token_ids[2, :3].tolist() == three.tolist()
    assert got.top.logprobs[2, :3] == pytest.approx(log_softmax(logits[2, three]), abs=2e-5)
    assert (got.top.logprobs[2, 3:5] == -np.inf).all()
    assert np.exp(got.top.logprobs[2, :3].astype(float)).sum() == pytest.approx(1, abs=1e-6)


def test_nothing_is_computed_when_no_row_asks(logits: np.ndarray) -> None:
    got = sample(logits, "raw_logprobs", SamplingParams())
    assert got.logprobs is None and got.ranks is None and got.top is None
    cheap = sample(logits, "raw_logprobs", SamplingParams(logprobs=0))
    assert cheap.logprobs is not None and cheap.ranks is None and cheap.top is None


def test_equal_logits_share_a_rank_and_are_listed_by_id() -> None:
    row = np.zeros((1, 200), dtype=np.float32)
    row[0, 150] = 1.0
    got = sample(row, "raw_logprobs", SamplingParams(allowed_token_ids=[77], logprobs=3))
    assert got.ranks is not None and got.top is not None
    assert got.ranks.tolist() == [2] and got.top.token_ids.tolist() == [[150, 0, 1]]


@pytest.mark.parametrize("size, k", [(1, 1), (5, 5), (200, 7), (5000, 20), (5000, 4000)])
def test_the_largest_ids_are_those_of_a_stable_sort(size: int, k: int) -> None:
    row = np.round(np.random.default_rng(k).normal(0, 9, size)).astype(np.float32)
    assert largest_ids(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()


def test_more_alternatives_than_tokens_give_all_tokens() -> None:
    got = sample(np.zeros((1, 9), dtype=np.float32), "raw_logprobs", SamplingParams(logprobs=1000))
    assert got.top is not None and got.top.token_ids.tolist() == [list(range(9))]


@pytest.mark.parametrize("k", [0, 1, 6])
def test_prompt_logprobs_are_those_of_the_targets(logits: np.ndarray, k: int) -> None:
    targets = np.array([0, 5, 3000, 7, 7, 1])
    got, want = prompt_logprobs(torch.from_numpy(logits), targets, k), log_softmax(logits)
    assert got.values == pytest.approx(want[np.arange(6), targets], abs=2e-5)
    if k == 0:
        assert got.ranks is None and got.top_ids is None and got.top_values is None
        return
    assert got.ranks is not None and got.top_ids is not None and got.top_values is not None
    assert got.ranks.tolist() == (1 + (logits > logits[np.arange(6), targets][:, None]).sum(1)).tolist()
    assert np.array_equal(got.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :k])
    assert got.top_values == pytest.approx(np.take_along_axis(want, got.top_ids, 1), abs=2e-5)


def test_prompt_logprobs_of_nothing_are_empty() -> None:
    assert prompt_logprobs(np.zeros((0, 5), dtype=np.float32), np.zeros(0, dtype=int), 2).values.shape == (0,)


def test_wrong_prompt_arguments_are_named() -> None:
    logits = np.zeros((2, 5), dtype=np.float32)
    with pytest.raises(InvalidArgument, match=r"float64 \(2, 5\)"):
        prompt_logprobs(logits.astype(np.float64), np.array([1, 2]), 0)
    with pytest.raises(InvalidArgument, match="targets from 0 to 4"):
        prompt_logprobs(logits, np.array([1, 5]), 0)
    with pytest.raises(InvalidArgument, match="k is -1"):
        prompt_logprobs(logits, np.array([1, 2]), -1)
