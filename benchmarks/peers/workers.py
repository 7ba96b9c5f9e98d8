"""Starting engines: their virtual environments, their processes, one job at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.protocol import Answer, Job, Setup
from ramet.config import DType

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}  #: names of the dtypes in tables


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the repository's folder, made on first use; git ignores it."""

    folder: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()  #: packages to take out again after the installation

    def path(self, name: str) -> str:
        """Return the path of a file in the environment."""
        return str(ROOT / self.folder / name)

    def python(self) -> str:
        """Return the interpreter, after making the environment if it is not there."""
        stamp, python = Path(self.path(".installed")), self.path("bin/python")
        wanted = "\n".join(self.requirements)
        if not stamp.is_file() or stamp.read_text() != wanted:
            print(f"Installing {' '.join(self.requirements)} into {self.folder} ...", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", self.path("")], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *self.requirements], check=True)
            if self.removed:
                subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *self.removed], check=True)
            stamp.write_text(wanted)
        return python


@dataclass(frozen=True)
class Peer:
    """An engine in one precision."""

    name: str
    module: str
    dtype: DType
    weights: str = "hf"  #: the form it reads (``peers.weights.prepare``)
    environment: Environment | None = None  #: None: the one that runs this script
    max_prefill_tokens: int | None = None  #: cases whose n x prompt is above this are left out
    variables: tuple[tuple[str, str], ...] = ()  #: of the process environment

    @property
    def label(self) -> str:
        return f"{self.name} {PRECISIONS[self.dtype]}"

    def is_able(self, prefill_tokens: int) -> bool:
        """Whether it takes part in a case of so many tokens, each sample's prompt counted."""
        return self.max_prefill_tokens is None or prefill_tokens <= self.max_prefill_tokens


class WorkerError(RuntimeError):
    """An engine could not be started or died."""


class Worker:
    """A running engine. Between jobs it is stopped, so that its spinning threads cost the others nothing."""

    def __init__(self, peer: Peer, setup: Setup) -> None:
        self.peer = peer
        try:
            python = peer.environment.python() if peer.environment else sys.executable
        except subprocess.CalledProcessError as error:
            raise WorkerError(f"{peer.label}: {error}") from None
        threads = str(setup.threads)
        self._process = subprocess.Popen(
            [python, "-m", f"peers.{peer.module}", json.dumps(asdict(setup))],
            cwd=ROOT / "benchmarks",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", **dict(peer.variables)},
        )
        try:
            hello = self._read()
        except BaseException:
            self.close()
            raise
        self.load_seconds: float = hello["load_seconds"]
        self.versions: dict[str, str] = hello["versions"]
        self._stop()

    def run(self, job: Job) -> Answer:
        """Run one job and return its answer, with the time as the engine's own process saw it."""
        self._process.send_signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        answer = Answer(**self._read())
        self._stop()
        return answer

    def close(self) -> None:
        """End the process, stopped or not."""
        self._process.kill()
        self._process.wait()

    def _stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"{self.peer.label} ended with exit code {self._process.wait()}.")
        message: dict[str, Any] = json.loads(line)
        return message
