"""``ramet bench attention``: every attention backend side by side, beside the floor of the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ramet.cli import environment
from ramet.cli.bench import commit
from ramet.cli.common import Context, add_common_options
from ramet.cli.options import Parser, Settings
from ramet.errors import InvalidArgument, nearest

USAGE = "[options]"
DESCRIPTION = (
    "Measure one layer's attention over a forest: P prompts with n rows each, every backend beside the floor of the "
    "device. A backend's error against dense attention is checked first; a wrong one is not timed. The last line of "
    "the output is JSON."
)
_DTYPES = ("bfloat16", "float16", "float32")


def add_options(parser: Parser) -> None:
    """Add the command's options."""
    group = parser.add_argument_group("Shapes")
    parser.option(
        group,
        "--preset",
        metavar="NAME",
        help="table, grid, smollm2, llama8b or nested; with --prompts it is not needed, else 'table'.",
    )
    parser.option(group, "--sample", type=int, metavar="N", help="So many shapes of the preset, drawn by --seed.")
    for flag, default, text in (
        ("--prompts", None, "Prompts, for one shape of your own."),
        ("--n", 1, "Rows below each prompt."),
        ("--prompt-len", 0, "Tokens of a prompt; 0 shares nothing."),
        ("--system-len", 0, "Tokens above all prompts."),
        ("--tail", 256, "Tokens of each row's own."),
        ("--q-len", 1, "Query tokens of a row."),
        ("--heads", 28, "Query heads."),
        ("--kv-heads", 4, "KV heads."),
        ("--head-dim", 128, "Elements of a head."),
        ("--page-size", 128, "Tokens of a page."),
    ):
        parser.option(group, flag, default=default, type=int, metavar="N", help=text)
    group = parser.add_argument_group("Measurement")
    parser.option(group, "--dtype", default="bfloat16", metavar="NAME", help=f"Of q, K and V: {', '.join(_DTYPES)}.")
    parser.option(group, "--device", default="auto", metavar="NAME", help="cuda, cpu, or auto: a GPU if there is one.")
    parser.option(group, "--backends", metavar="A,B", help="Backends to measure; all that are registered by default.")
    parser.option(
        group, "--deterministic", default=False, action="store_true", help="Also the price of deterministic=True."
    )
    parser.option(group, "--seed", default=0, type=int, metavar="N", help="Of the tensors and of --sample.")
    group = parser.add_argument_group("Output")
    parser.option(group, "--json", metavar="FILE", help="Write everything measured, after every shape.")
    parser.option(group, "--plot", metavar="FILE", help="Draw time over floor; needs matplotlib: ramet[plot].")
    parser.option(
        group,
        "--calibrate",
        metavar="FILE",
        help="Measure the planner's cost table for this GPU instead, and write it.",
    )
    add_common_options(parser)


def run(settings: Settings, context: Context) -> int:
    """Run the command."""
    import torch

    from ramet.bench.attention_floor import rates_of
    from ramet.bench.attention_report import header, plot, require_matplotlib, row, sharing, write_json
    from ramet.bench.attention_runner import Bench, Result, candidates

    shapes, dtype, device = _shapes(settings), _dtype(settings), _device(settings)
    chosen = candidates([name.strip() for name in (settings["backends"] or "").split(",") if name.strip()], device.type)
    json_file, plot_file = (_file(settings, name) for name in ("json", "plot"))
    if plot_file is not None:
        require_matplotlib()
    if settings["calibrate"] is not None:
        return _calibrate(settings, context, device)
    rates, source = rates_of(device, dtype)
    origin = {**_origin(settings, device), "rates": rates.__dict__, "rates_from": source}
    bench = Bench(device, dtype, rates, settings["seed"], settings["deterministic"])
    context.write(_origin_lines(origin))
    context.write(header(settings["deterministic"]))
    results: list[Result] = []
    with torch.inference_mode():
        for shape in shapes:
            for result in bench.measure(shape, chosen):
                results.append(result)
                context.write(row(result, settings["deterministic"]))
            if json_file is not None:
                write_json(json_file, results, origin)
    context.write("\n".join(sharing(results)), end="\n" if sharing(results) else "")
    if plot_file is not None:
        plot(plot_file, results, f"Attention of one layer, {origin['hardware']['name']}, {settings['dtype']}")
    context.write(_last_line(results, origin))
    return int(any(result.status in ("wrong", "failed") for result in results))


def _last_line(results: list[Any], origin: dict[str, Any]) -> str:
    import json

    from ramet.bench.attention_report import as_json

    return json.dumps(as_json(results, origin), ensure_ascii=False)


def _shapes(settings: Settings) -> list[Any]:
    from ramet.bench.attention_shapes import Shape, preset, sample

    own = settings["prompts"] is not None
    if own and (settings["preset"] is not None or settings["sample"] is not None):
        raise InvalidArgument("--prompts gives one shape; leave --preset and --sample out, or leave --prompts out.")
    shape = Shape(
        prompts=settings["prompts"] if own else 1,
        n=settings["n"],
        prompt_len=settings["prompt_len"],
        tail=settings["tail"],
        q_len=settings["q_len"],
        system_len=settings["system_len"],
        num_qo_heads=settings["heads"],
        num_kv_heads=settings["kv_heads"],
        head_dim=settings["head_dim"],
        page_size=settings["page_size"],
    )
    if own:
        return [shape]
    misplaced = [name for name in ("n", "prompt_len", "system_len", "q_len") if name in settings.sources]
    if misplaced:
        flag = "--" + misplaced[0].replace("_", "-")
        raise InvalidArgument(f"{flag} is for a shape of your own; give --prompts too, or leave it out.")
    shapes = preset(settings["preset"] or "table", replace(shape, q_len=1))
    return shapes if settings["sample"] is None else sample(shapes, settings["sample"], settings["seed"])


def _dtype(settings: Settings) -> Any:
    import torch

    name = settings["dtype"]
    if name not in _DTYPES:
        raise InvalidArgument(f"--dtype is {name!r}{nearest(name, _DTYPES)} Allowed: {', '.join(_DTYPES)}.")
    return getattr(torch, name)


def _device(settings: Settings) -> Any:
    import torch

    name = settings["device"]
    if name not in ("auto", "cuda", "cpu"):
        raise InvalidArgument(f"--device is {name!r}; allowed: auto, cuda, cpu.")
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("--device cuda: torch finds no GPU here; use --device cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _file(settings: Settings, name: str) -> Path | None:
    if settings[name] is None:
        return None
    path = Path(settings[name])
    if not path.parent.is_dir():
        raise InvalidArgument(f"--{name} {path}: there is no folder {path.parent}.")
    return path


def _origin(settings: Settings, device: Any) -> dict[str, Any]:
    import torch

    on_gpu = device.type == "cuda"
    packages = environment.packages()
    wanted = ("ramet", "torch", "numpy", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "flashinfer-python")
    versions = {name: packages.get(name) or environment.package_version(name) for name in wanted}
    return {
        "device": device.type,
        "hardware": environment.gpus()[0] if on_gpu else environment.cpu(),
        "cuda": torch.version.cuda if on_gpu else None,
        "threads": torch.get_num_threads(),
        "versions": {name: version for name, version in versions.items() if version},
        "commit": commit(),
        "dtype": settings["dtype"],
        "seed": settings["seed"],
    }


def _origin_lines(origin: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in origin["versions"].items())
    rates = origin["rates"]
    return (
        f"{origin['hardware']['name']}, {origin['dtype']}; {versions}"
        f"{', commit ' + origin['commit'] if origin['commit'] else ''}\n"
        f"floor: {rates['bytes_per_second'] / 1e12:.3g} TB/s, {rates['flops_per_second'] / 1e12:.3g} TFLOP/s "
        f"({origin['rates_from']})"
    )


def _calibrate(settings: Settings, context: Context, device: Any) -> int:
    from ramet.bench.attention_calibrate import calibrate

    path = _file(settings, "calibrate")
    assert path is not None
    table = calibrate(device, _dtype(settings), settings["head_dim"], context.write)
    table.save(path)
    context.write(f"written: {path}; RAMET_ATTENTION_COSTS={path} makes the planner use it")
    return 0
