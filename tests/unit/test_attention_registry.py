"""Choosing a backend: order, edits, exact lists, refusals, explanations; the cache never outlives what it read."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_oracle import Case

from ramet.attention import Problem, backend_order, explain, plan, select, supports
from ramet.attention.registry import BACKENDS
from ramet.errors import InvalidArgument, Unsupported

ALL = tuple(BACKENDS)
PROBLEM = Problem(4, 2, 64, 16)
ON_GPU = Problem(4, 2, 64, 16, device="cuda")


@pytest.mark.parametrize(
    ("edits", "order"),
    [
        ("", ALL),
        (" , ", ALL),
        ("+reference", ("reference", *(name for name in ALL if name != "reference"))),
        ("+cpu", ("cpu", *(name for name in ALL if name != "cpu"))),
        ("-cpu", tuple(name for name in ALL if name != "cpu")),
        ("-cpu,+cpu", ("cpu", *(name for name in ALL if name != "cpu"))),
        ("-reference, +cpu", ("cpu", *(name for name in ALL if name not in ("cpu", "reference")))),
        ("reference", ("reference",)),
        ("reference, cpu", ("reference", "cpu")),
        ("cpu,cpu", ("cpu",)),
    ],
)
def test_edits_and_exact_lists(edits: str, order: tuple[str, ...]) -> None:
    assert backend_order(edits) == order


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ("+refrence", "'refrence'; did you mean 'reference'.*Known: .*cpu, .*reference"),
        ("cup", "'cup'; did you mean 'cpu'"),
        ("-xyzzy", "no attention backend is called 'xyzzy'. Known"),
        ("+", "no attention backend is called ''"),
        ("+cpu,reference", "mixes edits"),
        ("cpu,-reference", "mixes edits"),
        (",".join(f"-{name}" for name in ALL), "leaves no attention backend"),
    ],
)
def test_lists_that_mean_nothing_are_refused(edits: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        backend_order(edits)
    with pytest.raises(InvalidArgument, match=words):
        select(PROBLEM, edits)


def test_the_environment_edits_the_order_whenever_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case()
    case.row(case.node(-1, 3))
    for value, expected in (("-cpu", "reference"), ("", "cpu"), ("+reference", "reference"), ("cpu", "cpu")):
        monkeypatch.setenv("RAMET_ATTENTION", value)
        assert select(PROBLEM).name == explain(PROBLEM).backend == expected
        assert plan(case.forest(), **case.shape()).backend == expected
    monkeypatch.setenv("RAMET_ATTENTION", "cpu")
    assert select(PROBLEM, "reference").name == "reference"  # an argument counts more than the environment
    monkeypatch.setenv("RAMET_ATTENTION", "gpu")
    with pytest.raises(InvalidArgument, match="'gpu'"):
        plan(case.forest(), **case.shape())


def test_a_pinned_backend_is_refused_with_its_reason_and_never_replaced() -> None:
    with pytest.raises(Unsupported, match="cpu serves tensors on the CPU, not on cuda"):
        select(ON_GPU, "cpu")
    assert select(ON_GPU).name == "reference"
    with pytest.raises(Unsupported, match="not torch.int32"):
        select(Problem(4, 2, 64, 16, dtype=torch.int32))


def test_explain_gives_the_reason_and_those_of_whom_it_passed_over() -> None:
    chosen = explain(ON_GPU)
    assert chosen.backend == "reference"
    passed_over = [name for name in ALL if name != "reference"]
    assert chosen.declined == tuple((name, supports(ON_GPU, name).reason) for name in passed_over)
    reasons = "; ".join(f"{name} declined: {why}" for name, why in chosen.declined)
    assert str(chosen) == f"reference: {supports(ON_GPU, 'reference').reason}; {reasons}"
    nobody = explain(ON_GPU, "cpu")
    assert nobody.backend is None
    with pytest.raises(Unsupported) as error:
        select(ON_GPU, "cpu")
    assert str(error.value) == str(nobody)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_cpu_backend_names_the_dtype_it_computes_in(dtype: torch.dtype) -> None:
    answer = supports(Problem(4, 2, 64, 16, dtype=dtype), "cpu")
    assert answer.ok
    assert "torch." in answer.reason


def test_supports_refuses_an_unknown_backend() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'cpu'"):
        supports(PROBLEM, "cpuu")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tensors_a_plans_backend_does_not_serve_are_refused(backend: str) -> None:
    case = Case()
    case.row(case.node(-1, 3))
    work = plan(case.forest(), **case.shape(), backend=backend)
    pool = torch.zeros(case.num_pages, 4, 2, 8, dtype=torch.int32)
    with pytest.raises(Unsupported, match=f"{backend} serves .* not torch.int32"):
        work.run(torch.zeros(1, 4, 8, dtype=torch.int32), pool, pool, sm_scale=1.0)


def test_attention_can_be_imported_alone() -> None:
    """It brings in the exceptions and nothing else of the package."""
    code = "import sys, ramet.attention; print(*sorted(m for m in sys.modules if m.startswith('ramet')))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    rest = [name for name in modules if not name.startswith("ramet.attention")]
    assert rest == ["ramet", "ramet.errors"]
