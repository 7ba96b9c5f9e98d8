"""``ramet doctor`` and ``ramet collect-env``: facts, and one broken part hides no other."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Shell

from ramet.cli import doctor, environment


@pytest.fixture
def shell() -> Shell:
    return Shell()


def test_doctor_reports_every_topic_and_says_that_ramet_runs(shell: Shell) -> None:
    assert shell.run("doctor") == 0
    topics = {line.split()[1] for line in shell.out.splitlines() if line.split()[0] in ("ok", "note")}
    assert topics >= {"ramet", "torch", "cpu", "memory", "gpu", "dtype", "attention", "gguf", "hub", "converted"}
    assert shell.out.splitlines()[-1] == "Ramet can run here"


def test_doctor_as_json(shell: Shell) -> None:
    assert shell.run("doctor", "--json") == 0
    report = json.loads(shell.out)
    assert report["ok"] is True
    assert {check["state"] for check in report["checks"]} <= {"ok", "note"}


def test_a_missing_package_fails_with_the_way_to_get_it(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {**environment.packages(), "tokenizers": None}
    monkeypatch.setattr(environment, "packages", lambda: installed)
    assert shell.run("doctor") == 1
    assert "fail  tokenizers" in shell.out
    assert "pip install" in shell.out
    assert shell.out.splitlines()[-1] == "something must be mended"


def test_a_broken_driver_fails_alone(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("driver\n  too old")

    monkeypatch.setattr(environment, "gpus", broken)
    assert shell.run("doctor") == 1
    assert "RuntimeError: driver too old" in shell.out
    assert "ok    dtype auto" in shell.out
    assert shell.run("collect-env") == 0
    assert "RuntimeError: driver" in shell.out
    assert "numpy" in shell.out


def test_sizes_of_folders_count_every_file_once(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b").write_bytes(b"x" * (1 << 20))
    (tmp_path / "link").symlink_to(tmp_path / "blobs" / "b")
    assert doctor._folder(tmp_path).endswith("(0.00 GiB)")
    assert doctor._folder(tmp_path / "none").endswith("(not there yet)")


def test_collect_env_has_machine_packages_and_variables(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMET_ATTENTION", "-cpu")
    assert shell.run("collect-env", "--json") == 0
    facts = json.loads(shell.out)
    assert facts["system"]["python"] == platform.python_version()
    assert facts["cpu"]["cores"] >= 1
    assert facts["cpu"]["memory"] > facts["cpu"]["memory_free"] > 0
    assert facts["packages"]["torch"]
    assert facts["variables"]["RAMET_ATTENTION"] == "-cpu"


def test_no_secret_of_the_environment_is_printed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for command in ("collect-env", "doctor"):
        assert shell.run(command) == 0
        assert "hf_secret" not in shell.out + shell.err


def test_every_attention_backend_is_listed_with_its_reason(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from ramet.attention.registry import BACKENDS

    edits = ",".join(f"-{name}" for name in BACKENDS if name != "reference")
    monkeypatch.setenv("RAMET_ATTENTION", edits)
    assert shell.run("doctor", "--json") == 0
    checks = {check["topic"]: check for check in json.loads(shell.out)["checks"]}
    assert all(checks[f"attention {name}"]["text"] for name in BACKENDS)
    assert f"asks reference (RAMET_ATTENTION={edits})" in checks["attention"]["text"]


def test_attention_backends_that_are_all_taken_out_fail(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from ramet.attention.registry import BACKENDS

    monkeypatch.setenv("RAMET_ATTENTION", ",".join(f"-{name}" for name in BACKENDS))
    assert shell.run("doctor") == 1
    assert "leaves no attention backend" in shell.out
