"""The starved pool at length, with other seeds and pools."""

from __future__ import annotations

import pytest
from harness import assert_all_free, run, tiny_engine
from test_starved_pool import assert_same, mixed_requests


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(5))
def test_mixed_requests_in_pools_of_many_sizes(seed: int) -> None:
    requests = mixed_requests(1000, seed=100 + seed)
    expected = run(tiny_engine(pages=20_000, max_num_seqs=64), requests)
    engine = tiny_engine(
        pages=34 + 40 * seed,
        page_size=(4, 2, 8, 1, 16)[seed] if seed != 3 else 4,
        max_num_seqs=16 + 8 * seed,
        max_num_batched_tokens=64 + 8 * seed,
        max_model_len=100,
    )
    got = run(engine, requests)
    assert_same(requests, got, expected)
    assert_all_free(engine)
