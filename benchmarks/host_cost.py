"""What rows cost the host: the engine with a model that computes nothing.

Prints milliseconds a step by row count (plan, load and commit; the model and the sampler apart), and the admission of a
group of 1,024. Last line JSON.

    python benchmarks/host_cost.py [--rows 256,512,1024,2048] [--steps 64]
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter

import numpy as np
import torch

from ramet.config import EngineConfig
from ramet.engine.engine import Engine
from ramet.engine.group import GroupRequest
from ramet.engine.memory import plan_memory
from ramet.engine.runner import Attend
from ramet.models.rope import RopeSpec
from ramet.models.spec import ModelSpec
from ramet.sampling_params import SamplingParams

PROMPT = 1000
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_qo_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0, rotary_dim=8),
    max_position_embeddings=4096,
)


class NullModel:
    """Answers with constant logits and never calls attention."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return torch.zeros(len(token_ids), SPEC.hidden_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), SPEC.vocab_size)


def make_engine(rows: int) -> Engine:
    """An engine with room for ``rows`` samples."""
    config = EngineConfig(
        model="null", max_num_seqs=rows, max_num_batched_tokens=max(8192, rows), kv_cache_memory_bytes=1 << 28
    )
    memory = plan_memory(config, SPEC, max_model_len=SPEC.max_position_embeddings, itemsize=4)
    return Engine(NullModel(), SPEC, config, memory)


def group(name: str, n: int, max_tokens: int, seed: int) -> GroupRequest:
    """n samples of a random prompt."""
    prompt = np.random.default_rng(seed).integers(0, SPEC.vocab_size, PROMPT).astype(np.int32)
    params = SamplingParams(n=n, max_tokens=max_tokens, detokenize=False)
    return GroupRequest(name, prompt, params, max_tokens, seed, stop_token_ids=(2,) if n == 0 else ())


def steady(rows: int, groups: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a decode step with ``rows`` samples of ``groups`` prompts."""
    engine = make_engine(rows)
    for g in range(groups):
        engine.add(group(str(g), rows // groups, steps + 24, g))
    while engine.rows.num_running < rows:
        engine.step()
    names = ("plan", "load", "forward", "sample", "commit")
    laps: list[list[float]] = []
    for _ in range(steps):
        before = [getattr(engine.stats, f"seconds_{name}") for name in names]
        engine.step()
        laps.append([getattr(engine.stats, f"seconds_{n}") - b for n, b in zip(names, before, strict=True)])
    median = np.median(np.array(laps) * 1e3, axis=0)
    host = np.array(laps)[:, [0, 1, 4]].sum(axis=1) * 1e3
    result = {name: round(float(value), 3) for name, value in zip(names, median, strict=True)}
    return {
        "rows": rows,
        "groups": groups,
        **result,
        "host": round(float(np.median(host)), 3),
        "host_max": round(float(host.max()), 3),
    }


def admission(n: int) -> float:
    """Milliseconds that admitting a group of ``n`` whose prompt is computed adds to a step."""
    best = float("inf")
    for _ in range(5):
        engine = make_engine(n)
        engine.add(group("warm", 1, 1, 0))
        while engine.has_unfinished:
            engine.step()
        engine.add(group("g", n, 8, 0))
        started = perf_counter()
        engine.step()
        best = min(best, (perf_counter() - started) * 1e3)
        assert engine.rows.num_running == n
    return round(best, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="256,512,1024,2048")
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    table = [steady(rows, groups, args.steps) for rows in map(int, args.rows.split(",")) for groups in (1, 16)]
    for row in table:
        print("  ".join(f"{key} {value:>7}" for key, value in row.items()))
    admitted = admission(1024)
    print(f"admission of a group of 1,024: {admitted} ms (one step, sampling included)")
    print(json.dumps({"steady": table, "admission_1024_ms": admitted}))


if __name__ == "__main__":
    main()
