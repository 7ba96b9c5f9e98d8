"""Facts about the machine and the installed packages."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "jinja2",
    "gguf",
    "triton",
    "xgrammar",
    "flashinfer-python",
    "fastapi",
)
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")
_VARIABLES = (
    "RAMET_ATTENTION",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
)


def package_version(name: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def ramet_version() -> str:
    """Return Ramet's version."""
    import ramet

    return ramet.__version__


def versions() -> dict[str, str]:
    """Return the versions that go into results."""
    found = {"ramet": ramet_version(), "python": platform.python_version()}
    return found | {name: v for name in ("torch", "numpy", "tokenizers") if (v := package_version(name))}


def packages() -> dict[str, str | None]:
    """Return the versions of everything Ramet can use; None where it is not installed."""
    return {"ramet": ramet_version(), **{name: package_version(name) for name in PACKAGES}}


def cpu() -> dict[str, Any]:
    """Return the processor's name, cores this process may use, the flags that matter, and memory in bytes."""
    import psutil

    name, flags = _cpu_info()
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "name": name or platform.processor() or platform.machine(),
        "cores": cores,
        "flags": [flag for flag in _CPU_FLAGS if flag in flags],
        "memory": memory.total,
        "memory_free": memory.available,
    }


def gpus() -> list[dict[str, Any]]:
    """Return the name, compute capability and memory of every CUDA device torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(i)
        found.append(
            {"name": device.name, "capability": f"{device.major}.{device.minor}", "memory": device.total_memory}
        )
    return found


def variables() -> dict[str, str]:
    """Return the environment variables that change how Ramet runs."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def hub_cache() -> Path:
    """Return the folder where huggingface_hub keeps models."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _cpu_info() -> tuple[str, set[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "", set()
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    entries = {key.strip(): value.strip() for key, _, value in lines}
    return entries.get("model name", ""), set((entries.get("flags") or entries.get("Features") or "").split())
