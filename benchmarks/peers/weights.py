"""The demo model's weights in the forms that peers read: a Hugging Face folder, and GGUF files without quantisation.

All are made from the Q4_1 file by dequantising it, so that every engine computes with the same numbers. The folder
is not Ramet's own converted copy: were that wrong, equal greedy tokens would prove nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file

from ramet.models.registry import resolve

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}


def _tensors(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {
        t.name: gguf.dequantize(t.data, t.tensor_type).reshape(tuple(reversed(t.shape.tolist())))
        for t in reader.tensors
    }


def write_gguf(source: Path, target: Path, precision: str) -> None:
    """Write `source` again with matrices in F32, F16 or BF16 and vectors in F32, its metadata unchanged."""
    kind = gguf.GGMLQuantizationType[precision]
    file_type = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}[precision]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        own = name.startswith("GGUF.") or name == "general.architecture"
        if own or name in ("general.file_type", "general.quantization_version"):
            continue
        value_type = field.types[0]
        item_type = field.types[-1] if value_type == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), value_type, sub_type=item_type)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    for name, tensor in _tensors(reader).items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _halves_not_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of q and k rows: it keeps rotary pairs side by side, Hugging Face in two halves."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _hf_config(reader: gguf.GGUFReader) -> dict[str, object]:
    def value(key: str) -> float:
        return float(reader.fields[f"llama.{key}"].contents())

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(value("embedding_length")),
        "intermediate_size": int(value("feed_forward_length")),
        "num_hidden_layers": int(value("block_count")),
        "num_attention_heads": int(value("attention.head_count")),
        "num_key_value_heads": int(value("attention.head_count_kv")),
        "max_position_embeddings": int(value("context_length")),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "vocab_size": len(reader.fields["tokenizer.ggml.tokens"].data),
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def write_hf_folder(source: Path, target: Path) -> None:
    """Write a Llama checkpoint (``config.json``, ``model.safetensors`` in float32) from a GGUF file."""
    reader = gguf.GGUFReader(source)
    config = _hf_config(reader)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, tensor in _tensors(reader).items():
        stem = name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in heads:
                tensor = _halves_not_pairs(tensor, int(str(heads[part])))
            stem = f"layers.{layer}.{LAYER_NAMES[part]}"
        else:
            stem = TOP_NAMES[stem]
        weights[f"model.{stem}.weight"] = np.ascontiguousarray(tensor)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1))


def prepare(folder: Path, form: str) -> Path:
    """Return the weights below `folder` in one form, made on the first call (5 s).

    Parameters
    ----------
    folder : Path
    form : {"hf", "F32", "F16", "BF16"}
        A Hugging Face folder, or the precision of a GGUF file.
    """
    source = resolve("smollm2-135m").gguf
    assert source is not None
    folder.mkdir(parents=True, exist_ok=True)
    if form == "hf":
        target = folder / "smollm2-135m"
        if not (target / "config.json").is_file():
            write_hf_folder(source, target)
        return target
    target = folder / f"smollm2-135m-{form.lower()}.gguf"
    if not target.is_file():
        partial = target.with_suffix(".partial")
        write_gguf(source, partial, form)
        partial.rename(target)
    return target
