"""``ramet doctor``: what works on this machine, and for what does not, why."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ramet.cli import environment
from ramet.cli.common import Context, add_common_options
from ramet.cli.options import Parser, Settings

USAGE = "[options]"
DESCRIPTION = (
    "Check the hardware, the packages, the attention backends and the model folders. Exit code 1 if one fails."
)

_GIB = 1 << 30
_OPTIONAL = {
    "gguf": ("gguf", "reads .gguf models: pip install 'ramet[gguf]'"),
    "yaml": ("PyYAML", "reads --config file.yaml: pip install pyyaml"),
    "triton": ("triton", "GPU kernels: pip install 'ramet[cuda]'"),
}


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes
    ----------
    topic : str
    state : "ok", "note" or "fail"
        ``note`` is worth knowing and stops nothing.
    text : str
    """

    topic: str
    state: Literal["ok", "note", "fail"]
    text: str


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("Output")
    parser.option(group, "--json", default=False, action="store_true", help="One JSON object instead of lines.")
    add_common_options(parser)


def run(settings: Settings, context: Context) -> int:
    """Run the command."""
    checks = check_all()
    failed = any(check.state == "fail" for check in checks)
    if settings["json"]:
        context.write(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, ensure_ascii=False))
    else:
        for check in checks:
            context.write(f"{check.state:<5} {check.topic:<20} {check.text}")
        context.write("something must be mended" if failed else "Ramet can run here")
    return int(failed)


def check_all() -> list[Check]:
    """Run every check; one that breaks is a failure of its own and hides no other."""
    checks: list[Check] = []
    for section in (_versions, _processor, _devices, _dtype, _attention, _optional_packages, _models):
        checks += _guarded(section)
    return checks


def _guarded(section: Callable[[], Iterator[Check]]) -> list[Check]:
    try:
        return list(section())
    except Exception as error:  # a broken driver or package can raise anything
        topic = section.__name__.strip("_").replace("_", " ")
        return [Check(topic, "fail", f"{type(error).__name__}: {' '.join(str(error).split())}")]


def _versions() -> Iterator[Check]:
    installed = environment.packages()
    for name in ("ramet", "torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2"):
        version = installed[name]
        yield Check(name, "fail" if version is None else "ok", version or "is not installed: pip install ramet")


def _processor() -> Iterator[Check]:
    cpu = environment.cpu()
    yield Check(
        "cpu", "ok", f"{cpu['name']}, {cpu['cores']} cores, {' '.join(cpu['flags']) or 'no vector flags known'}"
    )
    free = cpu["memory_free"] / _GIB
    text = f"{free:.1f} GiB free of {cpu['memory'] / _GIB:.1f}"
    yield Check("memory", "ok", text) if free >= 1 else Check("memory", "note", f"{text}: only small models fit")


def _devices() -> Iterator[Check]:
    found = environment.gpus()
    if not found:
        yield Check("gpu", "note", "none that torch can use; models run on the CPU")
    for gpu in found:
        text = f"{gpu['name']}, compute capability {gpu['capability']}, {gpu['memory'] / _GIB:.0f} GiB"
        yield Check("gpu", "note", f"{text}; this version runs models on the CPU")


def _dtype() -> Iterator[Check]:
    import torch

    from ramet.models.registry import resolve_dtype

    chosen = str(resolve_dtype("auto")).removeprefix("torch.")
    yield Check("dtype auto", "ok", f"{chosen}, {torch.get_num_threads()} threads")
    if not torch.backends.mkldnn.is_available():
        yield Check(
            "onednn", "note", "this torch has no oneDNN: linears are slower, and rows may differ between batches"
        )


def _attention() -> Iterator[Check]:
    from ramet.attention.problem import Problem
    from ramet.attention.registry import BACKENDS, ENVIRONMENT, explain, supports
    from ramet.models.registry import resolve_dtype

    usual = Problem(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=resolve_dtype("auto"))
    chosen = explain(usual)
    edits = f" ({ENVIRONMENT}={os.environ[ENVIRONMENT]})" if os.environ.get(ENVIRONMENT) else ""
    order = ", then ".join(chosen.order)
    yield Check("attention", "fail" if chosen.backend is None else "ok", f"asks {order}{edits}: {chosen}")
    for name in BACKENDS:
        works, reason = supports(usual, name)
        yield Check(f"attention {name}", "ok" if works else "note", reason)


def _optional_packages() -> Iterator[Check]:
    for module, (name, use) in _OPTIONAL.items():
        version = environment.package_version(name)
        works = version is not None and _imports(module)
        yield Check(name, "ok" if works else "note", version if works and version else f"is not there; {use}")


def _models() -> Iterator[Check]:
    from ramet.models.gguf import cache_root
    from ramet.models.registry import LOCAL_NAMES, resolve

    yield Check("hub models", "ok", _folder(environment.hub_cache()))
    yield Check("converted models", "ok", f"{_folder(cache_root())}; may be deleted")
    for name in LOCAL_NAMES:
        try:
            yield Check(name, "ok", str(resolve(name).gguf))
        except Exception as error:  # not installed, or damaged: the message says which
            yield Check(name, "note", str(error))


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except Exception:  # an installed package can fail to import with anything
        return False
    return True


def _folder(path: Path) -> str:
    if not path.is_dir():
        return f"{path} (not there yet)"
    # The hub's snapshots are links into its blobs: only real files take room.
    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and not f.is_symlink())
    return f"{path} ({size / _GIB:.2f} GiB)"
