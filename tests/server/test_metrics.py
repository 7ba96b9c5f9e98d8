"""The names of the metrics are an interface; what they cost is bounded."""

from __future__ import annotations

import asyncio
import re
import time
from types import SimpleNamespace

import pytest
from serving import Server, wait_for

from ramet.outputs import CompletionOutput, RequestOutput
from ramet.server.metrics import Metrics
from ramet.server.progress import log_progress, progress_line

FROZEN = {
    "e2e_request_latency_seconds": "histogram",
    "generation_tokens_total": "counter",
    "group_first_sample_seconds": "histogram",
    "group_last_sample_seconds": "histogram",
    "group_size": "histogram",
    "inter_token_latency_seconds": "histogram",
    "iteration_tokens_total": "histogram",
    "kv_cache_usage_perc": "gauge",
    "kv_pages_private": "gauge",
    "kv_pages_shared": "gauge",
    "num_preemptions_total": "counter",
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "prefill_tokens_saved_total": "counter",
    "prefix_cache_hits_total": "counter",
    "prefix_cache_queries_total": "counter",
    "prompt_tokens_total": "counter",
    "request_params_n": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_success_total": "counter",
    "shared_prefix_steps_total": "counter",
    "spec_decode_num_accepted_tokens_total": "counter",
    "spec_decode_num_draft_tokens_total": "counter",
    "spec_decode_num_drafts_total": "counter",
    "time_to_first_token_seconds": "histogram",
}


def values(server: Server) -> dict[str, float]:
    text = server.get("/metrics").text
    return {name: float(value) for name, value in re.findall(r"^(ramet:\S+) (\S+)$", text, re.MULTILINE)}


def test_names_kinds_and_labels_are_frozen(tiny: Server) -> None:
    text = tiny.get("/metrics").text
    assert dict(re.findall(r"# TYPE ramet:(\S+) (\S+)", text)) == FROZEN
    labels = {label for line in re.findall(r"\{(.*?)\}", text) for label in re.findall(r"(\w+)=", line)}
    assert labels == {"model_name", "le", "finished_reason", "path", "reason"}


def test_a_group_is_counted(tiny: Server) -> None:
    before = values(tiny)
    tiny.complete(prompt="count me", n=4, max_tokens=5, ignore_eos=True)
    tiny.events(prompt="count me", n=2, max_tokens=5, ignore_eos=True)
    after = values(tiny)

    def gained(name: str, labels: str = "") -> float:
        key = f'ramet:{name}{{{labels}model_name="tiny"}}'
        return after[key] - before[key]

    assert gained("generation_tokens_total") == 30
    assert gained("prompt_tokens_total") == 16
    assert gained("prefix_cache_hits_total") == 8
    assert gained("request_success_total", 'finished_reason="length",') == 6
    assert gained("request_params_n_sum") == gained("group_size_sum") == 6
    assert gained("time_to_first_token_seconds_count") == 2
    assert gained("inter_token_latency_seconds_count") == 24
    assert gained("e2e_request_latency_seconds_count") == gained("group_last_sample_seconds_count") == 2
    assert gained("prefill_tokens_saved_total") == 3 * 8 + 8 + 8


def test_ten_thousand_tokens_cost_less_than_two_percent_of_a_second() -> None:
    """The null model: every token is news of its own, the dearest case; CPU time, the best of five."""
    metrics = Metrics(SimpleNamespace(observer=None), "null")  # type: ignore[arg-type]
    outputs = [RequestOutput(f"r{i}", "x", [1], [CompletionOutput(0)]) for i in range(32)]
    for output in outputs:
        metrics.began(output)
    costs = []
    for _ in range(5):
        started = time.process_time()
        for i in range(10_000):
            metrics.news(outputs[i % 32].request_id, 1, 1, 0, i * 1e-4)
        costs.append(time.process_time() - started)
    assert min(costs) < 0.02


def test_the_line_of_the_log() -> None:
    now = {
        "requests_running": 2,
        "requests_waiting": 1,
        "samples_running": 8,
        "prompt_tokens": 200,
        "cached_prompt_tokens": 50,
        "steps": 20,
        "steps_shared": 10,
        "pages_in_use": 1,
        "pages_total": 4,
    }
    assert progress_line({}, now, generated=500, seconds=10) == (
        "prompt 20.0 tok/s, generation 50.0 tok/s, running 2 requests (8 samples), waiting 1, KV usage 25.0%, "
        "prefix hit rate 25.0%, shared path 50.0% of 20 steps"
    )
    idle = {**now, "requests_running": 0, "requests_waiting": 0}
    assert progress_line(idle, idle, generated=0, seconds=10) is None


def test_the_line_comes_while_something_happens_and_not_otherwise(
    tiny: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    watched = SimpleNamespace(llm=tiny.llm, metrics=tiny.llm.observer)
    logging = asyncio.run_coroutine_threadsafe(log_progress(watched, 0.05), tiny.loop)  # type: ignore[arg-type]
    try:
        tiny.complete(prompt="count me", n=4, max_tokens=300, ignore_eos=True)
        wait_for(lambda: progress_lines(caplog), 5)
        tiny.assert_free()
        time.sleep(0.2)  # what is left of the last busy interval
        lines = progress_lines(caplog)
        time.sleep(0.3)
        assert progress_lines(caplog) == lines, "nothing happened since"
    finally:
        logging.cancel()
    assert any("running 1 requests (4 samples)" in line for line in lines)


def progress_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "ramet.server.progress"]
