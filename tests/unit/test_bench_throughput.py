"""The benchmark's arithmetic: workloads, floors and reports against numbers worked out by hand."""

from __future__ import annotations

import json

import pytest
import torch

from ramet.bench.floor import Costs, Rates, best_seconds, measure_rates, workload_floor
from ramet.bench.report import json_line, results, table
from ramet.bench.runner import GroupTimes, Measurement, difference
from ramet.bench.workload import Workload
from ramet.errors import InvalidArgument
from ramet.models.rope import RopeSpec
from ramet.models.spec import ModelSpec

WORK = Workload(num_prompts=3, n=4, input_len=10, output_len=5, prefix_len=6, seed=1)


def test_prompts_have_their_length_and_share_the_prefix_only() -> None:
    prompts = WORK.prompts(1000)
    assert [len(p) for p in prompts] == [10, 10, 10]
    assert len({tuple(p[:6]) for p in prompts}) == 1
    assert len({tuple(p) for p in prompts}) == 3
    assert all(0 <= token < 1000 for p in prompts for token in p)
    assert prompts == WORK.prompts(1000)
    assert prompts[0] != WORK.prompts(1000, warm_up=True)[0]
    assert (WORK.unique_tokens, WORK.logical_tokens) == (6 + 3 * 4, 3 * 4 * 10)


def test_every_sample_is_exactly_as_long_as_asked() -> None:
    params = WORK.params(2)
    assert (params.n, params.max_tokens, params.ignore_eos, params.seed) == (4, 5, True, 3)


@pytest.mark.parametrize(
    "wrong",
    [{"num_prompts": 0}, {"n": 0}, {"input_len": 0}, {"output_len": -1}, {"prefix_len": 10}, {"prefix_len": -1}],
)
def test_a_workload_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        Workload(**{"num_prompts": 3, "n": 4, "input_len": 10, "output_len": 5, **wrong})


SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim=2,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=1e4, rotary_dim=2),
    max_position_embeddings=64,
)
LAYER = 8 * 16 + 8 * 8 + 3 * 8 * 16  # qkv (4 + 2 + 2 heads of 2), o, gate, up and down


def test_costs_follow_the_formulas() -> None:
    costs = Costs(SPEC, torch.float32, Rates(bytes_per_second=1e3, flops_per_second=1e6))
    parameters = 2 * LAYER + 800
    assert costs.linear(1, 1) == pytest.approx(parameters * 4 / 1e3)  # reading the weights decides
    assert costs.attention(5, 1) == pytest.approx(2 * 2 * 2 * 2 * 4 * 5 / 1e3)
    busy = Costs(SPEC, torch.bfloat16, Rates(bytes_per_second=1e12, flops_per_second=1e6))
    assert busy.linear(10, 3) == pytest.approx(2 * (2 * LAYER * 10 + 800 * 3) / 1e6)  # computing decides
    assert busy.attention(5, 7) == pytest.approx(4 * 2 * 4 * 2 * 7 / 1e6)


def test_the_floor_sums_prefill_and_every_decode_step() -> None:
    costs = Costs(SPEC, torch.float32, Rates(1e3, 1e12))
    work = Workload(num_prompts=1, n=4, input_len=10, output_len=3)
    floor = workload_floor(costs, work, max_num_seqs=256, chunk=2048)
    kv = 2 * 2 * 2 * 2 * 4 / 1e3
    decode = [costs.linear(4, 4) + kv * (10 + 4 * t) for t in (1, 2)]
    assert floor.seconds == pytest.approx(costs.linear(10, 1) + kv * 10 + sum(decode))
    assert floor.seconds_gemm == floor.seconds
    measured = workload_floor(costs, work, max_num_seqs=256, chunk=2048, gemm=lambda rows, logits: 1.0)
    assert measured.seconds_gemm == pytest.approx(3 + kv * (10 + 14 + 18))


def test_a_group_larger_than_the_batch_runs_in_waves() -> None:
    costs = Costs(SPEC, torch.float32, Rates(1e3, 1e12))
    work = Workload(num_prompts=1, n=8, input_len=10, output_len=3)
    whole = workload_floor(costs, work, max_num_seqs=8, chunk=2048, gemm=lambda rows, logits: 1.0)
    waves = workload_floor(costs, work, max_num_seqs=4, chunk=2048, gemm=lambda rows, logits: 1.0)
    kv = 2 * 2 * 2 * 2 * 4 / 1e3
    assert waves.seconds_gemm - whole.seconds_gemm == pytest.approx(2 + 2 * kv * (14 + 18) - kv * (18 + 26))


def test_measured_rates_are_those_of_a_computer() -> None:
    rates = measure_rates(torch.float32)
    assert 1e8 < rates.bytes_per_second < 1e13
    assert 1e8 < rates.flops_per_second < 1e16
    assert best_seconds(lambda: None, 2) < 0.1


def measurement() -> Measurement:
    groups = [GroupTimes([1.0, 2.0, 3.0, 4.0]), GroupTimes([2.0] * 4), GroupTimes([0.5, 1.0, 5.0, 9.0])]
    counters = {"steps": 8, "steps_shared": 6, "prefill_tokens": 18, "kv_tokens_read": 70, "kv_tokens_logical": 1000}
    return Measurement(2.0, 60, groups, counters, peak_pages=15, peak_private_pages=12)


def test_results_are_what_was_measured() -> None:
    found = results(measurement(), WORK, None, {"model": "m"})
    assert found["output_tokens_per_second"] == 30.0
    assert found["tokens_per_second"] == 45.0
    assert found["samples_per_second"] == 6.0
    assert (found["prefix_tokens_unique"], found["prefix_tokens_logical"]) == (18, 120)
    assert (found["kv_pages_shared"], found["kv_pages_private"]) == (3, 12)
    assert found["shared_path_share"] == 0.75
    seconds = [found[f"{k}_sample_seconds"] for k in ("first", "median", "last")]
    assert seconds == [1.0, 2.5, 4.0]
    assert "efficiency" not in found


def test_the_table_has_50_columns_and_a_block_for_many_samples() -> None:
    floor = workload_floor(Costs(SPEC, torch.float32, Rates(1e9, 1e12)), WORK, max_num_seqs=8, chunk=64)
    text = table(results(measurement(), WORK, floor, {}))
    rows = text.splitlines()
    assert all(len(row) == 50 for row in rows)
    assert rows[0].strip("=") == " Throughput Benchmark Result "
    assert "Many samples" in text
    assert "Output token throughput (tok/s):        30.00" in text
    assert "Efficiency (that floor / duration):" in text
    assert rows[-1] == "=" * 50


def test_unknown_values_are_left_out_and_not_invented() -> None:
    measured = measurement()
    measured.counters = {"steps": 8}
    assert "KV tokens read" not in table(results(measured, WORK, None, {}))


def test_the_last_line_is_json_of_everything() -> None:
    line = json_line(results(measurement(), WORK, None, {"model": "m", "versions": {"ramet": "1"}}))
    assert "\n" not in line
    found = json.loads(line)
    assert found["workload"]["n"] == 4
    assert found["counters"]["steps"] == 8
    assert found["versions"] == {"ramet": "1"}


def test_counters_are_differences_nested_ones_too() -> None:
    before = {"steps": 5, "tiers": {"plain": 2}, "seconds": 0.5, "name": "x"}
    after = {"pages_free": 7, "steps": 9, "tiers": {"plain": 3, "full": 1}, "seconds": 0.75, "name": "y"}
    assert difference(before, after) == {"steps": 4, "tiers": {"plain": 1, "full": 1}, "seconds": 0.25, "name": "y"}
