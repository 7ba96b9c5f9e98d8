"""``ramet bench attention``: floors against numbers worked out by hand, shapes, the runner on a CPU, the reports."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ramet.attention.cost_table import Costs
from ramet.attention.registry import BACKENDS
from ramet.bench.attention_calibrate import _costs
from ramet.bench.attention_data import Data
from ramet.bench.attention_floor import CARDS, floor_of
from ramet.bench.attention_report import as_json, header, row, sharing
from ramet.bench.attention_runner import Bench, Candidate, Result, candidates
from ramet.bench.attention_shapes import PRESETS, Shape, forest_of, one_level, pages_of, preset, sample
from ramet.bench.floor import Rates
from ramet.cli.common import Context
from ramet.cli.main import main
from ramet.errors import InvalidArgument

H200 = CARDS["NVIDIA H200"]
TINY = Shape(2, 3, 20, tail=10, q_len=2, num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=8)
BENCH = Bench(torch.device("cpu"), torch.float32, Rates(1e10, 1e11))


@pytest.mark.parametrize(
    "shape, us",
    [
        (Shape(3, 40, 600), 15.5),
        (Shape(3, 40, 4000), 20.3),
        (Shape(3, 40, 16000), 37.5),
        (Shape(1, 64, 8000), 11.6),
        (Shape(1, 256, 8000), 38.4),  # arithmetic is the limit
        (Shape(16, 16, 4000), 61.7),
        (Shape(32, 8, 1000), 46.5),
        (Shape(1, 4, 16000), 8.1),
        (Shape(3, 40, 4000, q_len=4), 37.1),
        (Shape(3, 40, 600, q_len=9), 16.8),
        (Shape(3, 40, 4000, q_len=9), 83.4),
    ],
)
def test_floors_on_an_h200_are_those_of_the_baselines(shape: Shape, us: float) -> None:
    assert floor_of(shape, 2, H200).us == pytest.approx(us, abs=0.06)


def test_a_floor_is_bytes_or_arithmetic() -> None:
    floor = floor_of(TINY, 4, Rates(1e6, 1e6))
    assert floor.bytes_us == 2 * 2 * 16 * 4 * (2 * 20 + 6 * 10)
    assert floor.flops_us == 4 * 4 * 16 * 2 * 6 * 30
    assert floor.us == max(floor)


def test_forests_have_each_node_once_and_pages_of_their_own() -> None:
    shape = Shape(2, 3, 20, tail=10, system_len=9, page_size=8)
    forest = forest_of(shape, np.arange(pages_of(shape))[::-1])
    assert forest.node_parent.tolist() == [-1, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (forest.node_end - forest.node_start).tolist() == [9, 20, 20] + 6 * [10]
    assert forest.node_end[forest.row_leaf].tolist() == 6 * [39]
    assert sorted(forest.node_pages.tolist()) == list(range(2 + 2 * 3 + 6 * 2))
    assert forest_of(Shape(2, 3, 0), np.arange(12)).node_parent.tolist() == 6 * [-1]


def test_whole_pages_keep_every_row_as_long_as_it_was() -> None:
    whole = Shape(3, 40, 600).whole_pages()
    assert (whole.prompt_len, whole.tail, whole.context) == (512, 344, 856)
    assert Shape(3, 40, 512).whole_pages() == Shape(3, 40, 512)
    assert Shape(3, 40, 100).whole_pages().prompt_len == 0
    with pytest.raises(InvalidArgument, match="system_len is 5"):
        Shape(1, 1, 0, system_len=5).whole_pages()


@pytest.mark.parametrize(
    "wrong",
    [{"prompts": 0}, {"n": 0}, {"prompt_len": -1}, {"q_len": 9, "tail": 8}, {"num_kv_heads": 3}, {"page_size": 0}],
)
def test_a_shape_that_makes_no_sense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong)) if "num_kv_heads" not in wrong else "num_qo_heads"):
        Shape(**{"prompts": 1, "n": 1, "prompt_len": 1, **wrong})


def test_presets() -> None:
    base = Shape(1, 1, 0, tail=100, page_size=64)
    table = preset("table", base)
    assert len(table) == 16 and table[0].name == "3x40 L600 t100 q1"
    grid = preset("grid", base)
    assert max(shape.rows for shape in grid) <= 1024 and len(set(grid)) == len(grid) == 306
    assert all(shape.page_size == 64 for name in PRESETS for shape in preset(name, base))
    assert {(s.num_qo_heads, s.num_kv_heads, s.head_dim) for s in preset("smollm2", base)} == {(9, 3, 64)}
    assert {(s.num_qo_heads, s.num_kv_heads, s.head_dim) for s in preset("llama8b", base)} == {(32, 8, 128)}
    nested, flat = preset("nested", base)
    assert one_level(nested) == flat and nested.context == flat.context and nested.node_tokens < flat.node_tokens
    with pytest.raises(InvalidArgument, match="did you mean 'table'"):
        preset("tabel", base)


def test_samples_are_those_of_their_seed() -> None:
    grid = preset("grid", Shape(1, 1, 0))
    assert sample(grid, 60, 1) == sample(grid, 60, 1) != sample(grid, 60, 2)
    assert len(set(sample(grid, 60, 1))) == 60
    assert sample(grid, 10_000, 0) == grid
    with pytest.raises(InvalidArgument, match="sample is 0"):
        sample(grid, 0, 0)


def test_the_truth_sees_valid_slots_only_and_knows_what_is_allowed() -> None:
    data = Data(TINY, torch.bfloat16, torch.device("cpu"), seed=0)
    assert len(data.pools) >= 8
    data.fill_unused(float("nan"))
    assert sum(int(k.isnan().any(-1).any(-1).sum()) for k, _ in data.pools[:1]) == 2 * 4 + 6 * 6  # rests of pages
    truth = data.truth()
    assert 2**-8 < truth.allowed < 0.1
    assert len(truth.tokens) == TINY.rows * TINY.q_len
    assert truth.error(truth.out.clone()) == 0.0
    assert truth.error(truth.out * 1.5) == pytest.approx(0.5)
    assert truth.error(torch.full_like(truth.out, float("nan"))) == float("inf")


def test_backends_side_by_side_on_a_cpu() -> None:
    results = list(BENCH.measure(TINY, candidates(["cpu", "reference", "fa4"])))
    by_name = {result.candidate: result for result in results}
    assert set(by_name) == {"cpu", "reference", "fa4", "fa4 unshared"}
    for name in ("cpu", "reference"):
        result = by_name[name]
        assert result.status == "ok" and result.us and result.plan_us and result.replan_us
        assert result.error is not None and result.error < 1e-6
        assert result.efficiency == pytest.approx(result.floor_us / result.us)
    assert by_name["fa4"].status == "unsupported" and "GPU" in by_name["fa4"].reason


class _Off:
    """A backend that is wrong, or raises."""

    name, strided = "cpu", False

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def __getattr__(self, name: str) -> object:
        return getattr(BACKENDS["cpu"], name)

    def compile(self, *arguments: object) -> _Off:
        return self

    def run(self, tensors: object) -> None:
        if self.fails:
            raise RuntimeError("no such\nkernel")
        tensors.out.fill_(1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fails, status, reason", [(False, "wrong", "relative error"), (True, "failed", "no such kern")]
)
def test_a_backend_that_is_wrong_is_reported_and_not_timed(fails: bool, status: str, reason: str) -> None:
    candidate = Candidate("off", _Off(fails), registered=False)  # type: ignore[arg-type]
    (result,) = BENCH.measure(TINY, [candidate])
    assert result.status == status and reason in result.reason and result.us is None
    assert f"{status}: " in row(result, False)


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'triton'"):
        candidates(["tritn"])
    assert "reference" not in {candidate.name for candidate in candidates((), "cuda")}


def test_rows_and_json() -> None:
    good = Result(TINY, "cpu", "ok", "", 2.0, error=1e-3, allowed=2e-3, us=4.0, plan_us=100.0, replan_us=50.0)
    line = row(good, deterministic=False)
    assert line.split() == ["2x3", "L20", "t10", "q2", "cpu", "4.0", "2.0", "2.00", "1.0e-03", "100", "50"]
    assert len(line) == len(header(False))
    assert row(good, True).split()[-2:] == ["-", "-"]
    found = json.loads(json.dumps(as_json([good], {"commit": "abc"})))
    assert found["format"] == 1 and found["commit"] == "abc"
    assert found["results"][0]["efficiency"] == 0.5
    assert found["results"][0]["shape"]["prompts"] == 2


def test_nested_forests_are_compared_with_one_level() -> None:
    nested, flat = preset("nested", Shape(1, 1, 0))
    results = [Result(shape, "x", "ok", "", 1.0, us=us) for shape, us in ((nested, 10.0), (flat, 15.0))]
    assert sharing(results) == ["2048+8x16 L1024 q1, x: 10.0 us nested, 15.0 us with one level of sharing"]
    assert sharing(results[:1]) == []


SHAPE = {"prompts": 2, "n": 3, "prompt-len": 20, "tail": 10, "q-len": 2, "heads": 4, "kv-heads": 2, "head-dim": 16}
FLAGS = {**SHAPE, "page-size": 8, "device": "cpu", "dtype": "float32", "backends": "cpu"}
ARGV = ["bench", "attention", *(f"--{flag}={value}" for flag, value in FLAGS.items())]


def command(*argv: str) -> tuple[int, str, str]:
    context = Context(stdout=io.StringIO(), stderr=io.StringIO())
    code = main(argv, context)
    return code, context.stdout.getvalue(), context.stderr.getvalue()  # type: ignore[attr-defined]


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    code, out, err = command(*ARGV, "--json", str(tmp_path / "a.json"))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "TB/s" in lines[1] and lines[2] == header(False) and lines[3].startswith("2x3 L20 t10 q2")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found == json.loads(lines[-1])
    assert {"hardware", "versions", "commit", "dtype", "seed", "rates", "results"} <= set(found)


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--preset", "nonsense"], "there is no preset 'nonsense'"),
        (["--prompts", "2", "--preset", "grid"], "leave --preset and --sample out"),
        (["--n", "4"], "give --prompts too"),
        (["--dtype", "bfloat61"], "did you mean 'bfloat16'"),
        (["--device", "tpu"], "allowed: auto, cuda, cpu"),
        (["--backends", "flash"], "no attention backend is called 'flash'"),
        (["--prompts", "1", "--json", "/nowhere/x.json"], "there is no folder"),
        (["--prompts", "0"], "prompts is 0"),
        (["--sample", "0"], "sample is 0"),
    ],
)
def test_bad_arguments_are_one_clear_line(argv: list[str], said: str) -> None:
    code, out, err = command("bench", "attention", *argv)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_a_plot_needs_matplotlib_and_says_so_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = command(*ARGV, "--plot", str(tmp_path / "a.png"))
    assert code == 2 and out == "" and "pip install 'ramet[plot]'" in err


def test_calibration_needs_a_gpu() -> None:
    code, _, err = command("bench", "attention", "--device", "cpu", "--calibrate", "costs.json")
    assert code == 2 and "--calibrate measures a GPU" in err


class _Modelled:
    """Times that follow known costs: 5 us, 4 TB/s, and what a table that splits finely gains at 256 tokens."""

    sm_count = 132

    def us(self, shape: Shape, costs: Costs, gate: str = "auto") -> float:
        levels = bool(shape.system_len) + bool(shape.prompt_len)
        partials = shape.rows * 28 * levels * 2e-4
        if costs.item_us > 1:
            return 5 + shape.node_tokens * 2048 / 4e6 + partials
        return 20 + abs(costs.min_split_tokens - 256) / 100


def test_costs_are_slopes_of_times() -> None:
    start = Costs("triton", 128, 2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 64)
    found = _costs(_Modelled(), Shape(1, 1, 0), start)  # type: ignore[arg-type]
    assert found.launch_us == pytest.approx(5, abs=0.01)
    assert found.bytes_per_us == pytest.approx(4e6)
    assert found.partial_ns == pytest.approx(0.2)
    assert found.row_block_us == pytest.approx(16 * 64 * 2048 / 4e6)
    assert found.min_split_tokens == 256
    assert found.item_us > 0 and (found.backend, found.head_dim) == ("triton", 128)
