"""Aborts leave nothing behind: memory stays flat, every page and slot comes back."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
from harness import assert_all_free, request, run, tiny_engine


def storm(aborts: int, warm: int) -> float:
    """Start and abort groups at random moments; returns the growth of the process after the first ``warm``, in MiB."""
    engine = tiny_engine(pages=120, max_num_seqs=24, max_num_batched_tokens=48)
    rng = np.random.default_rng(5)
    trunk = rng.integers(0, 96, 60).tolist()
    names: list[str] = []
    done = started = 0
    baseline = 0.0
    while done < aborts:
        while len(names) < 12:
            prompt = trunk[: rng.integers(1, 60)] + rng.integers(0, 96, 4).tolist()
            name = f"r{started}"
            engine.add(request(name, prompt, n=int(rng.integers(1, 6)), seed=started, max_tokens=40, logprobs=0))
            names.append(name)
            started += 1
        engine.step()
        for name in [n for n in names if n not in engine.groups or rng.random() < 0.3]:
            names.remove(name)
            if name in engine.groups:
                if rng.random() < 0.3:
                    engine.abort(name, 0)
                engine.abort(name)
                done += 1
        if baseline == 0.0 and done >= warm:
            gc.collect()
            baseline = psutil.Process().memory_info().rss
    gc.collect()
    growth = (psutil.Process().memory_info().rss - baseline) / 2**20
    for name in list(engine.groups):
        engine.abort(name)
    run(engine)
    assert_all_free(engine)
    assert not engine.groups
    assert not engine.sampling.occupied.any()
    return growth


def test_two_thousand_aborts_leave_memory_flat() -> None:
    assert storm(aborts=2000, warm=1200) < 12


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_thousand_aborts_leave_memory_flat() -> None:
    assert storm(aborts=10_000, warm=2000) < 12
