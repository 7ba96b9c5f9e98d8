"""Cost of the CPU sampler: tiers, log-probabilities, and what admission and recording cost the host.

    python benchmarks/sampler_cpu.py [--vocab 49152] [--threads 2] [--repeats 20]

The logits imitate a language model's: normal with deviation 3 and a few tokens far above. Times are minima in ms; the
last line is JSON. "floor" is one torch pass over the logits (a maximum per row), for comparison on another machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from ramet.sampling.sampler import SampleBatch, Sampler
from ramet.sampling.state import SamplingState
from ramet.sampling_params import SamplingParams

BATCHES = (32, 256)
TIERS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "plain, temperature 1": {},
    "plain, temperature 0.8": {"temperature": 0.8},
    "top_k=50": {"top_k": 50},
    "top_p=0.95": {"top_p": 0.95},
    "top_k=20 top_p=0.8": {"top_k": 20, "top_p": 0.8},
    "min_p=0.05": {"min_p": 0.05},
    "plain, logprobs=0": {"logprobs": 0},
    "plain, logprobs=5": {"logprobs": 5},
    "plain, penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "plain, allowed ids": {"allowed_token_ids": list(range(100, 20_000))},
}


def minimum_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the shortest time of a call in milliseconds."""
    call()
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best * 1e3


def model_like_logits(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Return float32 logits [rows, vocab_size]."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab_size), dtype=np.float32) * 3
    for row in logits:
        row[rng.integers(0, vocab_size, 20)] += rng.exponential(6, 20).astype(np.float32)
    return torch.from_numpy(logits)


def batch_of(rows: int, shared: bool = False) -> SampleBatch:
    """Return a batch of rows at position 200 with 100 generated tokens."""
    index = np.zeros(rows, dtype=np.int64) if shared else np.arange(rows)
    return SampleBatch(np.arange(rows), index, np.full(rows, 200), np.full(rows, 100, dtype=np.int32))


def time_tiers(rows: int, vocab_size: int, repeats: int) -> dict[str, float]:
    """Return ms per step by tier."""
    logits, batch = model_like_logits(rows, vocab_size), batch_of(rows)
    prompt = np.random.default_rng(1).integers(0, vocab_size, 100)
    times = {"floor": minimum_ms(lambda: logits.amax(dim=1), repeats)}
    for name, fields in TIERS.items():
        state = SamplingState(rows, vocab_size)
        said = np.random.default_rng(2).integers(0, vocab_size, (rows, 100))
        state.admit(batch.slots, SamplingParams(n=rows, **fields), 7, batch.slots, prompt, said)  # type: ignore[arg-type]
        sampler = Sampler(state)
        times[name] = minimum_ms(lambda s=sampler: s.sample(logits, batch), repeats)  # type: ignore[misc]
    state = SamplingState(rows, vocab_size)
    state.admit(batch.slots, SamplingParams(n=rows), 7, batch.slots, prompt)
    sampler, shared = Sampler(state), batch_of(rows, shared=True)
    times["plain, one logits row for all (fork)"] = minimum_ms(lambda: sampler.sample(logits[:1], shared), repeats)
    return times


def time_host(rows: int, vocab_size: int, repeats: int) -> dict[str, float]:
    """Return ms of admitting and recording ``rows`` slots."""
    slots, prompt = np.arange(rows), np.arange(1000)
    times: dict[str, float] = {}
    tokens = np.random.default_rng(3).integers(0, vocab_size, rows)
    for name, fields in {"plain": {}, "penalties": {"repetition_penalty": 1.1}}.items():
        state = SamplingState(rows, vocab_size)
        params = SamplingParams(n=rows, **fields)  # type: ignore[arg-type]

        def admit_and_release(state: SamplingState = state, params: SamplingParams = params) -> None:
            state.admit(slots, params, 7, slots, prompt)
            state.release(slots)

        times[f"admit + release, {name}"] = minimum_ms(admit_and_release, repeats)
        said = np.random.default_rng(4).integers(0, vocab_size, (rows, 200))
        state.admit(slots, params, 7, slots, prompt, said)
        times[f"record, {name}"] = minimum_ms(lambda s=state: s.record(slots, tokens), repeats)  # type: ignore[misc]
        times[f"memory MiB, {name}"] = state.nbytes / 2**20
    return times


def main() -> None:
    """Run and print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results: dict[str, dict[str, float]] = {}
    for rows in BATCHES:
        results[f"{rows} x {args.vocab}"] = time_tiers(rows, args.vocab, args.repeats)
    results["host, 2048 rows"] = time_host(2048, args.vocab, args.repeats)
    for title, times in results.items():
        print(f"\n{title:40}      ms")
        for name, value in times.items():
            print(f"  {name:38} {value:8.3f}")
    about = {"processor": platform.processor(), "threads": args.threads, "torch": torch.__version__}
    print(json.dumps({"about": about, "ms": results}))


if __name__ == "__main__":
    main()
