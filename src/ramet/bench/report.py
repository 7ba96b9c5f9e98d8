"""The report of a benchmark: a table of 50 columns for people, one line of JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ramet.bench.floor import Floor
from ramet.bench.runner import Measurement
from ramet.bench.workload import Workload

WIDTH = 50


def results(
    measured: Measurement, workload: Workload, floor: Floor | None, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results as one flat object.

    Parameters
    ----------
    measured : Measurement
    workload : Workload
    floor : Floor, optional
        None leaves its keys out.
    origin : mapping
        Model, engine settings, hardware, versions and commit.
    """
    seconds, counters = measured.seconds, measured.counters
    inputs = workload.num_prompts * workload.input_len
    first, middle, last = measured.group_seconds()
    steps = max(counters.get("steps", 0), 1)
    found = {
        "num_prompts": workload.num_prompts,
        "elapsed_time": seconds,
        "total_input_tokens": inputs,
        "total_output_tokens": measured.generated_tokens,
        "requests_per_second": workload.num_prompts / seconds,
        "output_tokens_per_second": measured.generated_tokens / seconds,
        "tokens_per_second": (inputs + measured.generated_tokens) / seconds,
        "n": workload.n,
        "samples_per_second": workload.num_prompts * workload.n / seconds,
        "prefix_tokens_unique": counters.get("prefill_tokens", workload.unique_tokens),
        "prefix_tokens_logical": workload.logical_tokens,
        "kv_tokens_read": counters.get("kv_tokens_read"),
        "kv_tokens_logical": counters.get("kv_tokens_logical"),
        "kv_pages_shared": measured.peak_pages - measured.peak_private_pages,
        "kv_pages_private": measured.peak_private_pages,
        "first_sample_seconds": first,
        "median_sample_seconds": middle,
        "last_sample_seconds": last,
        "steps": counters.get("steps"),
        "shared_path_share": counters.get("steps_shared", 0) / steps,
    }
    if floor is not None:
        found |= {
            "measured_bytes_per_second": floor.rates.bytes_per_second,
            "measured_flops_per_second": floor.rates.flops_per_second,
            "floor_seconds": floor.seconds,
            "floor_gemm_seconds": floor.seconds_gemm,
            "efficiency": floor.seconds_gemm / seconds,
        }
    return {**found, "workload": workload.as_dict(), "counters": counters, **origin}


_THROUGHPUT = (
    ("Successful requests:", "num_prompts", "{:,}"),
    ("Benchmark duration (s):", "elapsed_time", "{:.2f}"),
    ("Total input tokens:", "total_input_tokens", "{:,}"),
    ("Total generated tokens:", "total_output_tokens", "{:,}"),
    ("Request throughput (req/s):", "requests_per_second", "{:.2f}"),
    ("Output token throughput (tok/s):", "output_tokens_per_second", "{:,.2f}"),
    ("Total token throughput (tok/s):", "tokens_per_second", "{:,.2f}"),
)
_SAMPLES = (
    ("Samples of a prompt (n):", "n", "{:,}"),
    ("Sample throughput (samples/s):", "samples_per_second", "{:.2f}"),
    ("Prefix tokens, unique:", "prefix_tokens_unique", "{:,}"),
    ("Prefix tokens, logical:", "prefix_tokens_logical", "{:,}"),
    ("KV tokens read:", "kv_tokens_read", "{:,}"),
    ("KV tokens read without sharing:", "kv_tokens_logical", "{:,}"),
    ("KV pages at the peak, shared:", "kv_pages_shared", "{:,}"),
    ("KV pages at the peak, private:", "kv_pages_private", "{:,}"),
    ("Time to first sample of a group (s):", "first_sample_seconds", "{:.2f}"),
    ("Time to median sample (s):", "median_sample_seconds", "{:.2f}"),
    ("Time to last sample (s):", "last_sample_seconds", "{:.2f}"),
    ("Steps on the shared path:", "shared_path_share", "{:.1%}"),
)
_FLOOR = (
    ("Read bandwidth, measured (GB/s):", "measured_bytes_per_second", "{:.1f}", 1e9),
    ("GEMM rate, measured (GFLOP/s):", "measured_flops_per_second", "{:.0f}", 1e9),
    ("Floor (s):", "floor_seconds", "{:.2f}", 1),
    ("Floor with measured GEMMs (s):", "floor_gemm_seconds", "{:.2f}", 1),
    ("Efficiency (that floor / duration):", "efficiency", "{:.1%}", 1),
)


def table(found: Mapping[str, Any]) -> str:
    """Return the table; rows whose value is unknown are left out."""
    lines = [f"{' Throughput Benchmark Result ':=^{WIDTH}}"]
    lines += _rows(found, _THROUGHPUT)
    lines += [f"{'Many samples':-^{WIDTH}}", *_rows(found, _SAMPLES)]
    if "floor_seconds" in found:
        lines.append(f"{'Floor':-^{WIDTH}}")
        lines += [_row(label, form.format(found[key] / unit)) for label, key, form, unit in _FLOOR]
    lines.append("=" * WIDTH)
    return "\n".join(lines)


def json_line(found: Mapping[str, Any]) -> str:
    """Return the results as one line."""
    return json.dumps(found, ensure_ascii=False, default=str)


def _rows(found: Mapping[str, Any], rows: tuple[tuple[str, str, str], ...]) -> list[str]:
    return [_row(label, form.format(found[key])) for label, key, form in rows if found.get(key) is not None]


def _row(label: str, value: str) -> str:
    return f"{label:<39} {value:<10}"
