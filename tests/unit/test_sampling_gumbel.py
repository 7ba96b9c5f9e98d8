"""Drawing: scoring few tokens finds the winner of scoring all, bit for bit, and cut-offs keep what sorting keeps."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from ramet.sampling.cutoffs import cutoff, largest_first, lower_bound
from ramet.sampling.gumbel import Hasher, Rows, draw_from_all, draw_from_kept
from ramet.sampling.rng import RowKeys, gumbel_noise, row_keys, stream_keys, token_bits

VOCAB = 20_011
ROWS = 10


@cache
def distributions() -> dict[str, np.ndarray]:
    """Rows of logits [ROWS, VOCAB] of all sorts."""
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 3, (ROWS, VOCAB))
    peaked = normal.copy()
    peaked[:, 17] += 40
    two_levels = np.where(rng.random((ROWS, VOCAB)) < 0.5, 0.0, -20.0)
    plateau = np.where(np.arange(VOCAB) < 2000, 0.0, -8.0) + 0 * normal
    steep = -np.arange(VOCAB) * 0.01 + 0 * normal
    holes = np.where(rng.random((ROWS, VOCAB)) < 0.999, -np.inf, normal)
    one = np.full((ROWS, VOCAB), -np.inf)
    one[:, -1] = 3.0
    large = normal * 1000
    all_ = {
        "normal": normal, "peaked": peaked, "uniform": 0 * normal, "two levels": two_levels, "plateau": plateau,
        "steep": steep, "holes": holes, "one": one, "large": large, "ties": np.round(normal),
    }  # fmt: skip
    return {name: logits.astype(np.float32) for name, logits in all_.items()}


def rows_of(logits: np.ndarray, temperature: float, lowest: np.ndarray | None = None) -> Rows:
    """Rows with the keys of samples 0, 1, ... at position 9."""
    index = np.arange(len(logits))
    likeliest = logits.argmax(axis=1)
    inverse = np.full(len(logits), min(1 / temperature, 3e38), dtype=np.float32)
    lowest = np.full(len(logits), -np.inf, dtype=np.float32) if lowest is None else lowest
    keys = row_keys(stream_keys(3, index), np.full(len(logits), 9))
    return Rows(logits, index, likeliest, logits.max(axis=1), inverse, lowest, keys)


def all_scored(rows: Rows) -> np.ndarray:
    """The tokens by scoring every one."""
    keys = RowKeys(rows.keys.multiplier[:, None], rows.keys.offset[:, None])
    noise = gumbel_noise(token_bits(keys, np.arange(rows.logits.shape[1])[None]))
    with np.errstate(over="ignore"):
        scores = (rows.logits - rows.peak[:, None]) * rows.inv_temperature[:, None] + noise
    return np.where(rows.logits >= rows.lowest[:, None], scores, -np.inf).argmax(axis=1)


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 0.7, 1.0, 5.0, 1e4])
@pytest.mark.parametrize("name", list(distributions()))
def test_scoring_few_tokens_finds_the_winner_of_scoring_all(name: str, temperature: float) -> None:
    logits = distributions()[name]
    hasher = Hasher(VOCAB)
    hasher.max_rows = 4  # blocks, the last of them shorter
    tenth = np.sort(logits, axis=1)[:, int(0.9 * VOCAB)]
    with np.errstate(over="ignore"):
        for lowest in (None, tenth, logits.max(axis=1)):
            rows = rows_of(logits, temperature, lowest)
            want = all_scored(rows)
            assert np.array_equal(draw_from_all(rows, hasher), want)
            if lowest is not None:
                kept = [np.flatnonzero(row >= low) for row, low in zip(logits, lowest, strict=True)]
                assert np.array_equal(draw_from_kept(rows, kept), want)


def test_few_tokens_are_scored_whatever_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []

    def counted(bits: np.ndarray) -> np.ndarray:
        scored.append(len(bits))
        return gumbel_noise(bits)

    monkeypatch.setattr("ramet.sampling.gumbel.gumbel_noise", counted)
    for name, logits in distributions().items():
        scored.clear()
        draw_from_all(rows_of(logits, 1.0), Hasher(VOCAB))
        assert sum(scored) / ROWS < 0.1 * VOCAB, name


def kept_by_sorting(row: np.ndarray, temperature: float, k: int, p: float, min_p: float) -> tuple[set[int], float]:
    """Tokens that are kept, by a full sort in float64, and how near the nearest cut-off is."""
    z = (row.astype(np.float64) - row.max()) / temperature
    order = np.argsort(-z, kind="stable")
    keep, margin = z > -np.inf, 1.0
    if k:
        keep &= z >= z[order[k - 1]]
    if p < 1:
        mass = np.cumsum(np.where(keep, np.exp(z), 0)[order])
        share = mass / mass[-1]
        margin = min(margin, float(np.abs(share - p).min()))
        keep &= z >= z[order[min(int(np.searchsorted(share, p)), len(z) - 1)]]
    if min_p:
        margin = min(margin, float(np.abs(z - np.log(min_p)).min()))
        keep &= z >= np.log(min_p)
    return set(np.flatnonzero(keep).tolist()), margin


FILTERS = [(k, 1.0, 0.0) for k in (1, 50, 3000, 20_000)] + [(0, p, 0.0) for p in (0.3, 0.95, 0.9999)]
FILTERS += [(40, 0.8, 0.0), (0, 1.0, 0.2), (100, 0.9, 0.01)]


@pytest.mark.parametrize("name", list(distributions()))
def test_cutoffs_keep_what_a_full_sort_keeps(name: str) -> None:
    compared = 0
    for row in distributions()[name][:3]:
        for temperature in (0.5, 1.0, 3.0):
            for k, p, min_p in FILTERS:
                want, margin = kept_by_sorting(row, temperature, k, p, min_p)
                if margin < 1e-6:
                    continue
                compared += 1
                lowest = cutoff(row, row.max(), np.float32(1 / temperature), k, p, min_p)
                got = set(np.flatnonzero((row >= lowest) & (row > -np.inf)).tolist())
                assert got == want, (temperature, k, p, min_p)
    assert compared >= 30


def test_tokens_that_tie_with_the_last_kept_one_are_kept_too() -> None:
    row = np.array([3, 1, 2, 2, 2, 0], dtype=np.float32)
    for k, p, want in ((2, 1.0, [0, 2, 3, 4]), (0, 0.6, [0, 2, 3, 4]), (5, 1.0, [0, 1, 2, 3, 4])):
        lowest = cutoff(row, row.max(), np.float32(1), k, p, 0.0)
        assert np.flatnonzero(row >= lowest).tolist() == want


@pytest.mark.parametrize("size", [1, 2, 63, 64, 129, 5000])
def test_the_bound_is_reached_by_k_values_and_the_largest_come_in_order(size: int) -> None:
    row = np.round(np.random.default_rng(size).normal(0, 20, size)).astype(np.float32)
    for k in {1, 2, min(30, size), size // 2, size} - {0}:
        if k > size:
            continue
        assert np.count_nonzero(row >= lower_bound(row, k)) >= k
        top = largest_first(row, k)
        assert np.array_equal(top, np.sort(row[row >= np.sort(row)[size - k]])[::-1])
