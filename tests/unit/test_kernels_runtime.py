"""Compiling and launching without a GPU: the cache, refusals, and structures as the driver's header lays them out."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from ramet.errors import Unsupported
from ramet.kernels import driver, nvrtc


class FakeCompiler:
    """Counts what it compiles."""

    version = (13, 0)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, ...]] = []

    def compile(self, name: str, source: str, headers: dict[str, str], options: tuple[str, ...]) -> tuple[bytes, str]:
        self.compiled.append(options)
        return f"{name} {source} {options}".encode(), ""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    compiler = FakeCompiler()
    monkeypatch.setattr(nvrtc, "compiler", lambda: compiler)
    monkeypatch.setenv(nvrtc.CACHE, str(tmp_path))
    return compiler


def build(**defines: object) -> bytes:
    return nvrtc.compile_cached("some.cu", "source", {"a.cuh": "text"}, defines, "sm_90a")


def test_compiles_once_for_each_set_of_macros(fake: FakeCompiler) -> None:
    first = build(DIM=64)
    assert build(DIM=64) == first and len(fake.compiled) == 1
    assert build(DIM=128) != first and len(fake.compiled) == 2
    assert "--gpu-architecture=sm_90a" in fake.compiled[0] and "-DDIM=64" in fake.compiled[0]


def test_leaves_no_partial_file(fake: FakeCompiler) -> None:
    build()
    assert [file.suffix for file in nvrtc.cache_folder().iterdir()] == [".cubin"]


def test_works_without_a_place_to_write(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(nvrtc.CACHE, str(tmp_path / "file"))
    assert build() and build() and len(fake.compiled) == 2


def test_structures_have_the_sizes_of_the_header() -> None:
    assert ctypes.sizeof(driver._Config) == 56
    assert ctypes.sizeof(driver._Attribute) == 72
    assert ctypes.sizeof(driver._Words) == 128


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4, 65, dtype=torch.float16)[..., :64], torch.zeros(4, 64, 4).mT])
def test_rows_off_16_bytes_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(Unsupported, match="multiples of 16 bytes"):
        driver.tensor_map(tensor, (1, 1, 64))
