"""Models that are missing, damaged or not supported: one clear line through the Python API and the command line."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TINY, tiny_llm
from safetensors.torch import load_file, save_file

from ramet import LLM, SamplingParams
from ramet.cli.common import Context
from ramet.cli.main import main
from ramet.config import EngineConfig
from ramet.errors import InvalidArgument, ModelError, OutOfMemory, RametError, Unsupported
from ramet.models.dummy import DummyWeights
from ramet.models.registry import load_model
from ramet.models.spec import spec_from_config

DOWN = "model.layers.1.mlp.down_proj.weight"
Damage = Callable[[Path], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model: configuration, tokenizer and weights."""
    with tiny_llm() as llm:
        source = Path(llm.config.model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    weights = DummyWeights(spec_from_config(TINY), seed=1)
    save_file({name: weights.read(name) for name in weights.shapes()}, tmp_path / "model.safetensors")
    return tmp_path


def generate(model: str, *flags: str) -> tuple[int, str, str]:
    """Run ``ramet generate`` with the real engine."""
    context = Context(stdin=io.StringIO(), stdout=io.StringIO(), stderr=io.StringIO())
    code = main(["generate", model, "-q", "--prompt", "abc", "--max-tokens", "3", *flags], context)
    return code, context.stdout.getvalue(), context.stderr.getvalue()  # type: ignore[attr-defined]


def refused(model: str, kind: type[RametError], words: str, **settings: Any) -> None:
    """The same line through both front doors."""
    with pytest.raises(kind) as caught:
        LLM(model, **settings)
    text = str(caught.value)
    assert words in text and "\n" not in text and len(text) < 600, text
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    code, out, err = generate(model, *flags)
    assert (code, out) == (1 if kind is OutOfMemory else 2, "")
    assert err == f"ramet: error: {' '.join(text.split())}\n"


def test_the_model_of_these_tests_is_whole(folder: Path) -> None:
    code, out, err = generate(str(folder))
    assert (code, err) == (0, "") and out.strip()


def config(**changes: Any) -> Damage:
    return lambda folder: (folder / "config.json").write_text(json.dumps(TINY | changes))


def weights(**changes: torch.Tensor | None) -> Damage:
    """Change, add or (None) leave out weights."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file({k: v for k, v in (load_file(path) | changes).items() if v is not None}, path)

    return damage


def raw(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def index(content: object) -> Damage:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def quantised(method: str) -> Damage:
    return config(quantization_config={"quant_method": method})


DAMAGES: dict[str, tuple[Damage, type[RametError], str]] = {
    "missing weight": (weights(**{DOWN: None}), ModelError, f"lacks {DOWN}"),
    "missing head": (weights(**{"lm_head.weight": None}), ModelError, "lacks lm_head.weight"),
    "surplus weight": (weights(**{"model.extra.weight": torch.ones(3)}), ModelError, "model.extra.weight"),
    "misshaped weight": (weights(**{DOWN: torch.zeros(64, 48)}), ModelError, "(64, 48), but config.json asks"),
    "integer weight": (weights(**{DOWN: torch.zeros(48, 64, dtype=torch.int8)}), Unsupported, f"{DOWN} is torch.int8"),
    "truncated": (raw("model.safetensors", lambda b: b[:-100]), ModelError, "model.safetensors is not readable"),
    "wrong magic": (raw("model.safetensors", lambda b: b"GGUF" + b[4:]), ModelError, "is not readable as safetensors"),
    "empty file": (raw("model.safetensors", lambda b: b""), ModelError, "model.safetensors is not readable"),
    "no weights": (without("model.safetensors"), ModelError, "use load_format='dummy'"),
    "missing shard": (index({"weight_map": {"x": "model-9.safetensors"}}), ModelError, "lacks the shards model-9"),
    "no config": (without("config.json"), ModelError, "holds neither a config.json nor a .gguf file"),
    "damaged config": (raw("config.json", lambda b: b[:20]), ModelError, "config.json is not readable JSON"),
    "no tokenizer": (without("tokenizer.json"), ModelError, "has no tokenizer.json; give one: tokenizer="),
    "damaged tokenizer": (raw("tokenizer.json", lambda b: b[:20]), ModelError, "tokenizer.json cannot be read"),
    "AWQ": (quantised("awq"), Unsupported, "quantised (awq), which is not read"),
    "GPTQ": (quantised("gptq"), Unsupported, "quantised (gptq), which is not read"),
    "FP8": (quantised("fp8"), Unsupported, "quantised (fp8), which is not read"),
    "bitsandbytes": (quantised("bitsandbytes"), Unsupported, "quantised (bitsandbytes), which is not read"),
    "AWQ by name": (weights(**{"model.layers.0.mlp.up_proj.qweight": torch.ones(3)}), Unsupported, "up_proj.qweight"),
    "unknown family": (config(architectures=["LlamaForCausalLN"]), Unsupported, "did you mean 'LlamaForCausalLM'"),
    "no family": (config(architectures=None), ModelError, "it must name one class"),
    "other activation": (config(hidden_act="gelu"), Unsupported, "hidden_act is 'gelu'"),
    "endless layers": (config(num_hidden_layers=10**30), ModelError, "num_hidden_layers is 1000"),
    "no number": (config(rms_norm_eps=float("nan")), ModelError, "rms_norm_eps is nan"),
    "flat rope": (config(rope_scaling={"type": "yarn", "factor": 2.0}, rope_theta=1), ModelError, "rope_theta is 1.0"),
    "bad end": (config(eos_token_id="x"), ModelError, "eos_token_id is 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_named(name: str, folder: Path) -> None:
    damage, kind, words = DAMAGES[name]
    damage(folder)
    refused(str(folder), kind, words)


def test_a_generation_config_that_cannot_be_is_named_when_it_is_used(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "warm"}')
    with LLM(str(folder)) as llm:
        assert llm.generate("abc", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
        with pytest.raises(InvalidArgument, match=r"generation_config.json of .*: temperature is 'warm'; allowed"):
            llm.generate("abc", use_tqdm=False)


def test_dummy_weights_need_no_file_and_no_memory_that_is_not_there(folder: Path) -> None:
    without("model.safetensors")(folder)
    assert generate(str(folder), "--load-format", "dummy")[0] == 0
    config(hidden_size=2**20, intermediate_size=2**24)(folder)
    refused(str(folder), OutOfMemory, "choose a smaller model or dtype", load_format="dummy")


@pytest.mark.parametrize(
    "change", [lambda b: b[:2000], lambda b: b"JUNK" + b[4:], lambda b: b""], ids=["cut", "magic", "no"]
)
@pytest.mark.model
def test_a_damaged_gguf_file_is_named(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    from ramet.models.registry import resolve

    source = resolve("smollm2-135m").gguf
    assert source is not None
    with source.open("rb") as file:
        (tmp_path / "m.gguf").write_bytes(change(file.read(10_000)))
    refused(str(tmp_path / "m.gguf"), ModelError, f"{tmp_path / 'm.gguf'} ")


def test_names_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    for name, words in {
        "/no/such/model": "there is no model '/no/such/model'",
        "smollm2-135x": "did you mean 'smollm2-135m'",
        str(tmp_path): "holds neither a config.json nor a .gguf file",
        str(tmp_path / "weights.bin"): "allowed: a folder with config.json, or a .gguf file",
        "~nobody-of-this-name/model": "cannot be read",
        "x" * 5000: "cannot be read: File name too long",
    }.items():
        refused(name, ModelError, words)


def test_a_hub_name_offline_is_found_in_the_cache_or_refused(folder: Path, tmp_path_factory: Any) -> None:
    home, commit = tmp_path_factory.mktemp("home"), "a" * 40
    repository = home / "hub" / "models--org--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / commit)
    env = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(name: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "ramet", "generate", name, "-q", "--prompt", "abc", "--max-tokens", "3"]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)

    hit, miss = run("org/small"), run("org/other")
    assert (hit.returncode, hit.stderr) == (0, "") and hit.stdout.strip()
    assert (miss.returncode, miss.stdout) == (2, "")
    assert (
        miss.stderr.startswith("ramet: error: model 'org/other' is not in the cache") and miss.stderr.count("\n") == 1
    )
    assert "HF_HUB_OFFLINE is set" in miss.stderr


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_is_an_error_of_ours_or_none(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    messages: list[str] = []
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 2, 5])):
            data[rng.randrange(rng.choice([8, header, len(data)]))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        try:
            load_model(EngineConfig(model=str(folder), dtype="float32"))
        except RametError as error:
            messages.append(str(error))
    assert messages and not any("\n" in text for text in messages)
