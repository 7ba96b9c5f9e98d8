"""Ramet beside other engines on this CPU: n samples of one prompt, whole calls, tokens per second.

All engines compute with the same weights, in the same run and in turn (a busy machine then costs each the same); each
has a process of its own, is timed inside it, and is stopped while another one runs. A figure is the median of three
calls with three new prompts after one untimed call. ``make bench-cpu`` runs it; ``BENCH_PEERS`` names the engines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from cpu_report import Measurement, Report, hardware, software
from peers.catalogue import chosen
from peers.protocol import Job, Setup
from peers.weights import prepare
from peers.workers import PRECISIONS, ROOT, Peer, Worker, WorkerError
from ramet import EngineConfig
from ramet.bench.floor import Costs, Floor, linear_seconds, measure_rates, workload_floor
from ramet.bench.workload import Workload
from ramet.models.registry import load_model

MODEL = "smollm2-135m"
GOLDEN = ROOT / "tests" / "golden" / "smollm2_135m_greedy_fp32.json"
SLOW_SECONDS = 15.0  # an engine whose untimed call takes longer is timed once


@dataclass(frozen=True)
class Case:
    """What is asked of every engine."""

    n: int
    prompt: int
    new_tokens: int = 64

    @property
    def label(self) -> str:
        return f"n={self.n}, prompt {self.prompt}"

    def workload(self) -> Workload:
        """Return the same in the words of ``ramet.bench``."""
        return Workload(num_prompts=1, n=self.n, input_len=self.prompt, output_len=self.new_tokens)


CASES = (Case(1, 512), Case(8, 512), Case(32, 512), Case(64, 2048))


def job_of(case: Case, repeat: int) -> Job:
    """Return the job of a repeat: random ids, new for each repeat so that no prefix cache helps, equal for all."""
    rng = np.random.default_rng([case.n, case.prompt, repeat])
    ids = rng.integers(1000, 40_000, case.prompt).tolist()
    return Job(prompt_token_ids=ids, n=case.n, max_tokens=case.new_tokens, seed=repeat)


def matching_greedy_tokens(worker: Worker) -> str:
    """Return how many of the golden greedy tokens (float32) the engine reproduces before it first differs."""
    items = json.loads(GOLDEN.read_text())["items"][:3]
    same = total = 0
    for item in items:
        golden = item["greedy_token_ids"][:32]
        job = Job(item["prompt_token_ids"], n=1, max_tokens=len(golden), seed=0, greedy=True)
        got = worker.run(job).token_ids[0]
        same += next((i for i, (a, b) in enumerate(zip(golden, got, strict=False)) if a != b), len(golden))
        total += len(golden)
    return f"{same}/{total}"


def timed_call(worker: Worker, case: Case, repeat: int) -> tuple[float, float]:
    """Return seconds and peak MiB of one call, after checking that it gave what was asked."""
    answer = worker.run(job_of(case, repeat))
    lengths = [len(ids) for ids in answer.token_ids]
    if lengths != [case.new_tokens] * case.n:
        raise WorkerError(f"{worker.peer.label}, {case.label}: wrong numbers of tokens: {lengths}")
    if len(set(map(tuple, answer.token_ids))) != case.n:
        raise WorkerError(f"{worker.peer.label}, {case.label}: some of the samples are equal")
    return answer.seconds, answer.peak_rss_mib


def measure_case(workers: list[Worker], case: Case, repeats: int) -> list[Measurement]:
    """Run a case on all engines in turn."""
    able = [w for w in workers if w.peer.is_able(case.n * case.prompt)]
    calls: dict[str, list[float]] = {w.peer.label: [] for w in able}
    peaks: dict[str, float] = {}
    for repeat in range(repeats + 1):  # the first warms up
        for worker in able:
            label = worker.peer.label
            if repeat > 1 and calls[label][0] > SLOW_SECONDS:
                continue
            seconds, peaks[label] = timed_call(worker, case, repeat)
            calls[label].append(seconds)
            print(f"  {case.label}: {label}: {seconds:.2f} s", file=sys.stderr, flush=True)
    tokens = case.n * case.new_tokens
    return [
        Measurement(label, case.label, tokens, statistics.median(seconds[1:]), tuple(seconds[1:]), peaks[label])
        for label, seconds in calls.items()
    ]


def measure_floors(cases: tuple[Case, ...], peers: tuple[Peer, ...]) -> dict[str, dict[str, Floor]]:
    """Measure this CPU's rates and the model's matmuls; return the floors by precision of the engines and case."""
    floors: dict[str, dict[str, Floor]] = {}
    for dtype in sorted({peer.dtype for peer in peers}):
        name = PRECISIONS[dtype]
        model = load_model(EngineConfig(model=MODEL, dtype=dtype)).model
        costs = Costs(model.spec, model.dtype, measure_rates(model.dtype))
        gemm = partial(linear_seconds, model)
        floors[name] = {
            case.label: workload_floor(costs, case.workload(), max_num_seqs=case.n, chunk=case.prompt, gemm=gemm)
            for case in cases
        }
    return floors


def start_workers(peers: tuple[Peer, ...], threads: int, *, max_model_len: int) -> tuple[list[Worker], list[str]]:
    """Start the chosen engines; one that can't be started is reported and left out."""
    workers, missing = [], []
    for peer in peers:
        weights = str(prepare(ROOT / "build" / "bench", peer.weights))
        try:
            worker = Worker(peer, Setup(peer.dtype, threads, weights, max_model_len))
        except WorkerError as error:
            missing.append(str(error))
            print(f"Left out: {error}", file=sys.stderr)
            continue
        print(f"{peer.label}: loaded in {worker.load_seconds:.1f} s", file=sys.stderr, flush=True)
        workers.append(worker)
    return workers, missing


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each engine (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each case (default: 3)")
    parser.add_argument("--peers", default=os.environ.get("BENCH_PEERS", ""), help="default: $BENCH_PEERS")
    parser.add_argument("--cases", default="", help="numbers of samples to run, as in 1,32 (default: all)")
    parser.add_argument("--no-save", action="store_true", help="write nothing to benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table and its JSON, save both."""
    args = parse_arguments()
    wanted = {int(n) for n in args.cases.split(",") if n}
    cases = tuple(c for c in CASES if not wanted or c.n in wanted)
    torch.set_num_threads(args.threads)
    peers = chosen(args.peers)  # before minutes of measuring: a misspelt name ends here
    floors = measure_floors(cases, peers)
    workers, missing = start_workers(peers, args.threads, max_model_len=max(c.prompt + c.new_tokens for c in cases))
    try:
        greedy = {w.peer.label: matching_greedy_tokens(w) for w in workers}
        measurements = [m for case in cases for m in measure_case(workers, case, args.repeats)]
        versions = {k: v for w in workers for k, v in w.versions.items()}
    finally:
        for worker in workers:
            worker.close()
    report = Report(
        hardware=hardware(args.threads),
        software={**software(ROOT), **versions},
        floors=floors,
        measurements=measurements,
        greedy=greedy,
        missing=missing,
    )
    print(report.table())
    if not args.no_save:
        print(f"\nSaved as {report.save(ROOT / 'benchmarks' / 'results', 'cpu_peers').relative_to(ROOT)}")
    print(report.json_line())


if __name__ == "__main__":
    main()
