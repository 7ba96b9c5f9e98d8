"""GGUF files against the Hugging Face folder they were made from; the converted copy; damage and refusals."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models_oracle import PlainAttention
from torch import Tensor

from ramet.config import EngineConfig
from ramet.errors import ModelError, RametError, Unsupported
from ramet.models.dummy import DummyWeights
from ramet.models.gguf import cache_root
from ramet.models.registry import LoadedModel, load_model, resolve
from ramet.models.spec import spec_from_config

HEADS, KV_HEADS, HIDDEN, INNER, VOCAB, LAYERS = 4, 2, 64, 96, 64, 2
NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "converted"


def hf_config(family: str, tied: bool) -> dict[str, Any]:
    return dict(
        architectures=[NAMES[family]],
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=32 if family == "qwen3" else 16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        tie_word_embeddings=tied,
    )


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        base, _, kind = rest.rpartition(".")
        return f"blk.{layer}.{TENSORS[base]}.{kind}"
    tops = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return f"{tops[name.removesuffix('.weight')]}.weight"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's reordering of q and k rows: rotary pairs become neighbours."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


def write_pair(
    folder: Path, family: str, *, kind: gguf.GGMLQuantizationType | None = None, tied: bool = False, **metadata: Any
) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Write a GGUF file; return its path, the Hugging Face configuration and the weights that it stands for."""
    config = hf_config(family, tied)
    source = DummyWeights(spec_from_config(config), seed=2)
    path = folder / f"{family}.gguf"
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(500.0)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    for key, value in metadata.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{family}.{key.replace('__', '.')}", value)
    weights: dict[str, Tensor] = {}
    for name in source.shapes():
        value = source.read(name).numpy()
        if name.endswith(".bias"):
            value = np.linspace(-1, 1, len(value), dtype=np.float32)
        quantised = kind if kind is not None and value.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(value, quantised)
        weights[name] = torch.from_numpy(np.array(gguf.quants.dequantize(data, quantised), dtype=np.float32))
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            data = permuted(data, HEADS if "q_proj" in name else KV_HEADS)  # rows are quantised one by one
        writer.add_tensor(gguf_name(name), data, raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, config, weights


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


def load(path: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), dtype="float32"))


def logits(loaded: LoadedModel) -> Tensor:
    token_ids = torch.arange(40)
    return loaded.model.logits(loaded.model.forward(token_ids, token_ids, PlainAttention(loaded.spec)))


F32, F16, BF16, Q8_0, Q4_1 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_1"))


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    [
        ("llama", F32, False),
        ("llama", F16, True),
        ("llama", BF16, False),
        ("llama", Q8_0, True),
        ("llama", Q4_1, False),
        ("qwen2", F16, True),
        ("qwen3", Q8_0, False),
    ],
    ids=str,
)
def test_logits_equal_those_of_the_folder_it_was_made_from(
    family: str, kind: gguf.GGMLQuantizationType, tied: bool, tmp_path: Path
) -> None:
    path, config, weights = write_pair(tmp_path, family, kind=kind, tied=tied)
    loaded = load(path)
    assert torch.equal(logits(loaded), logits(load(write_folder(tmp_path / "folder", config, weights))))
    assert loaded.spec.eos_token_ids == (2, 7)
    assert loaded.spec.tie_word_embeddings == tied
    assert logits(loaded).std() > 0.3


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
        ({"rope__scaling__type": "none"}, {}),
    ],
)
def test_rope_scaling_of_the_metadata_counts(metadata: dict[str, Any], rope: dict[str, Any], tmp_path: Path) -> None:
    path, config, weights = write_pair(tmp_path, "qwen2", **metadata)
    folder = write_folder(tmp_path / "folder", config | {"rope_scaling": rope}, weights)
    assert torch.equal(logits(load(path)), logits(load(folder)))


def test_rope_factors_as_a_tensor_divide_the_frequencies(tmp_path: Path) -> None:
    path, config, weights = write_pair(tmp_path, "llama")
    plain = logits(load(path))
    reader = gguf.GGUFReader(path)
    again = tmp_path / "with_factors.gguf"
    writer = gguf.GGUFWriter(again, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_tensor("rope_freqs.weight", np.full(8, 2.0, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    halved = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    expected = logits(load(write_folder(tmp_path / "folder", config | halved, weights)))
    torch.testing.assert_close(logits(load(again)), expected, rtol=0, atol=1e-5)
    assert (plain - expected).abs().max() > 1e-2


def test_the_converted_copy_is_made_once_and_logged(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, _ = write_pair(tmp_path, "llama", kind=Q8_0)
    with caplog.at_level(logging.INFO, logger="ramet.models.gguf"):
        first = load(path)
    (folder,) = cache.iterdir()
    assert folder.name.startswith("llama-")
    assert str(folder) in caplog.text
    assert " MB in " in caplog.text
    monkeypatch.setattr(gguf, "GGUFReader", None)  # the copy alone must do now
    second = load(path)
    assert torch.equal(logits(first), logits(second))
    assert resolve(str(path)).gguf_metadata == first.files.gguf_metadata
    assert second.spec == first.spec
    assert second.files.gguf_metadata["tokenizer.ggml.tokens"][:2] == ["t0", "t1"]


def damage_truncated(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-7])


def damage_header(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(b"\xff" * file.stat().st_size)


def damage_missing(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


@pytest.mark.parametrize("damage", [damage_truncated, damage_header, damage_missing, damage_manifest])
def test_a_damaged_copy_is_made_again(damage: Any, cache: Path, tmp_path: Path) -> None:
    path, _, _ = write_pair(tmp_path, "llama")
    before = logits(load(path))
    (folder,) = cache.iterdir()
    damage(folder)
    assert torch.equal(logits(load(path)), before)
    assert list(cache.iterdir()) == [folder], "nothing else is left behind"
    assert torch.equal(logits(load(path)), before)


def test_another_file_of_the_same_name_gets_another_copy(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    load(write_pair(tmp_path / "a", "llama")[0])
    load(write_pair(tmp_path / "b", "llama", kind=F16)[0])
    assert len(list(cache.iterdir())) == 2


def test_large_models_are_converted_in_several_files(cache: Path, tmp_path: Path, monkeypatch: Any) -> None:
    path, config, weights = write_pair(tmp_path, "llama")
    monkeypatch.setattr("ramet.models.gguf.SHARD_BYTES", 40_000)
    loaded = load(path)
    assert len(list(next(cache.iterdir()).glob("*.safetensors"))) > 2
    assert torch.equal(logits(loaded), logits(load(write_folder(tmp_path / "folder", config, weights))))


def test_a_cache_that_is_a_file_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = write_pair(tmp_path, "llama")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAMET_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot write the converted model.*set RAMET_CACHE"):
        load(path)


def test_the_cache_is_in_the_home_folder_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAMET_CACHE", "~/elsewhere")
    assert cache_root() == Path.home() / "elsewhere" / "converted"
    monkeypatch.delenv("RAMET_CACHE")
    assert cache_root() == Path.home() / ".cache" / "ramet" / "converted"


def test_a_missing_gguf_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = write_pair(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'ramet\[gguf\]'"):
        load(path)


@pytest.mark.parametrize("keep", [4, 20, 300, 3000, -50])
def test_a_cut_file_is_damaged(keep: int, cache: Path, tmp_path: Path) -> None:
    path, _, _ = write_pair(tmp_path, "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="is damaged|lacks") as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    ("family", "metadata", "kind", "words"),
    [
        ("llama", {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, Unsupported, "'longrope'"),
        ("llama", {"expert_count": 8.0}, Unsupported, "mixture-of-experts"),
    ],
)
def test_what_is_not_read_is_named(
    family: str, metadata: dict[str, Any], kind: type[RametError], words: str, tmp_path: Path
) -> None:
    path, _, _ = write_pair(tmp_path, family, **metadata)
    with pytest.raises(kind, match=words):
        load(path)


def test_a_quantisation_that_the_package_does_not_read_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    path, _, _ = write_pair(tmp_path, "llama", kind=Q8_0)

    def fail(*_: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "dequantize", fail)
    with pytest.raises(Unsupported, match="token_embd.weight is stored as Q8_0"):
        load(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "phi3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Unsupported, match="architecture 'phi3' is not supported.*llama, qwen2, qwen3"):
        load(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load(path)
