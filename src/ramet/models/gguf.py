"""GGUF files: metadata, configuration, and a converted copy in Hugging Face layout.

Dequantising takes seconds, so the result is kept in ``${RAMET_CACHE:-~/.cache/ramet}/converted/<name>-<sha>``: a
Hugging Face folder in float32 (float16 and bfloat16 tensors stay as they are), about 7 times the size of a 4-bit file.
It may be deleted at any time; it is made again when it is missing or damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramet.errors import ModelError, Unsupported, shown
from ramet.models.gguf_metadata import read_metadata

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the converted folder; a change makes older ones be converted again."""
SHARD_BYTES = 2**30
"""A converted file is closed at this size, which bounds the memory that a conversion takes."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def cache_root() -> Path:
    """Return the folder of converted models: ``${RAMET_CACHE:-~/.cache/ramet}/converted``."""
    root = os.environ.get("RAMET_CACHE")
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "ramet") / "converted"


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ModelError("reading a GGUF file needs the gguf package: pip install 'ramet[gguf]'") from None
    return gguf


class GgufFile:
    """One GGUF file; everything expensive is read once, and from the converted copy where there is one.

    Raises
    ------
    ModelError
        If the file is damaged or the ``gguf`` package is not installed.
    Unsupported
        For an architecture, a rope scaling or a tensor type that is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def folder(self) -> Path:
        """Where the converted copy belongs. Hashing the file costs about 0.3 s for each 100 MB."""
        with self.path.open("rb") as file:
            sha = hashlib.file_digest(file, "sha256").hexdigest()
        return cache_root() / f"{self.path.stem}-{sha[:16]}"

    @cached_property
    def reader(self) -> Any:
        """``gguf.GGUFReader``, for the tensors: seconds, since it makes objects of every vocabulary entry."""
        reader_class = _gguf().GGUFReader
        try:
            return reader_class(self.path)
        except Exception as error:  # the reader checks nothing: a damaged file raises whatever NumPy or struct raise
            raise ModelError(f"{self.path} is damaged ({type(error).__name__}: {error}): fetch it again.") from None

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Every key-value pair."""
        return read_metadata(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration with Hugging Face keys."""
        cached = self._cached_json("config.json")
        if cached is not None:
            return cached
        config = _config(self.metadata, self.path)
        tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        config["tie_word_embeddings"] = "output.weight" not in tensors
        if "rope_freqs.weight" in tensors:  # llama3 scaling comes as divisors of the frequencies
            factors = np.asarray(tensors["rope_freqs.weight"].data, dtype=np.float32)
            config["rope_parameters"]["frequency_factors"] = factors.tolist()
        return config

    def converted(self) -> Path:
        """Return the folder of the converted copy, made now if it is missing or damaged."""
        if self._is_complete():
            return self.folder
        self.__dict__.pop("config", None)  # of a damaged copy
        start = time.perf_counter()
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=self.folder.parent))
            try:
                size = self._convert_into(scratch)
                if not self._is_complete():  # another process may have been faster
                    shutil.rmtree(self.folder, ignore_errors=True)
                    scratch.rename(self.folder)  # readers see a complete folder or none
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        except OSError as error:
            if not self._is_complete():
                raise ModelError(
                    f"cannot write the converted model to {self.folder} ({error}): free some space, or set RAMET_CACHE "
                    "to another folder."
                ) from None
        else:
            seconds = time.perf_counter() - start
            logger.info("converted %s in %.1f s: %.0f MB in %s", self.path.name, seconds, size / 1e6, self.folder)
        return self.folder

    def _cached_json(self, name: str) -> dict[str, Any] | None:
        if not self._is_complete():
            return None
        content: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        return content

    def _is_complete(self) -> bool:
        """Whether the converted copy has every file in its full size and every header can be read."""
        from safetensors import SafetensorError, safe_open

        try:
            manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
            if manifest["format"] != FORMAT:
                return False
            for name, size in manifest["files"].items():
                path = self.folder / name
                if path.stat().st_size != size:
                    return False
                if path.suffix == ".safetensors":
                    safe_open(path, framework="np")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
            return False
        return True

    def _convert_into(self, folder: Path) -> int:
        """Write the whole copy; return its size in bytes."""
        config = self.config
        _write_json(folder / "config.json", config)
        weight_map = _write_shards(folder, self._tensors(config))
        _write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        _write_json(folder / "manifest.json", {"format": FORMAT, "source": self.path.name, "files": sizes})
        return sum(sizes.values())

    def _tensors(self, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        permuted = {  # llama files keep rotary pairs as neighbours; Hugging Face keeps them half a head apart
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }
        for tensor in self.reader.tensors:
            name = _hf_name(tensor.name)
            if name is None:
                continue
            if "." not in name:
                raise ModelError(f"{self.path}: there is no weight {shown(name)} in a model: fetch the file again.")
            value = self._dequantise(tensor)
            kind = tensor.name.split(".")[-2]  # a name that is ours has two parts at least
            if config["architectures"] == ["LlamaForCausalLM"] and kind in permuted:
                pairs = value.view(permuted[kind], -1, 2, *value.shape[1:])
                value = pairs.transpose(1, 2).reshape(value.shape)
            yield name, value

    def _dequantise(self, tensor: Any) -> Tensor:
        types = _gguf().GGMLQuantizationType
        if tensor.tensor_type == types.F16:
            return torch.from_numpy(np.array(tensor.data))
        try:
            values = _gguf().quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise Unsupported(
                f"{self.path}: {tensor.name} is stored as {tensor.tensor_type.name}, which the gguf package cannot "
                "dequantise: use another quantisation of the model."
            ) from None
        except ValueError as error:
            raise ModelError(f"{self.path}: {tensor.name} is damaged ({error}): fetch the file again.") from None
        value = torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: what comes may be a read-only view
        return value.bfloat16() if tensor.tensor_type == types.BF16 else value


def _hf_name(name: str) -> str | None:
    """Translate a tensor's name; None for ``rope_freqs``, which the configuration carries. Unknown ones are kept."""
    if name == "rope_freqs.weight":
        return None
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in TOP_TENSORS:
        return f"{TOP_TENSORS[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in TENSORS:
        return f"model.layers.{parts[1]}.{TENSORS[parts[2]]}.{parts[3]}"
    return name


def _config(metadata: dict[str, Any], path: Path) -> dict[str, Any]:
    """Translate a GGUF file's metadata to Hugging Face keys."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise Unsupported(f"{path}: architecture {name!r} is not supported. Supported: {', '.join(ARCHITECTURES)}.")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    def needed(key: str, default: Any = None) -> Any:
        value = get(key, default)
        if value is None:
            raise ModelError(f"{path}: the metadata lacks {name}.{key}: fetch the file again.")
        return value

    def count(key: str, default: int | None = None) -> int:
        value = needed(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{path}: {name}.{key} is {shown(value)}; it must be an integer of at least 1.")
        return value

    if get("expert_count", 0):
        raise Unsupported(f"{path}: mixture-of-experts models ({get('expert_count')} experts) are not supported.")
    heads, hidden = count("attention.head_count"), count("embedding_length")
    head_dim = count("attention.key_length", max(hidden // heads, 1))
    special = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return {
        "architectures": [ARCHITECTURES[name]],
        "vocab_size": count("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
        "hidden_size": hidden,
        "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": needed("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": count("context_length"),
        "sliding_window": get("attention.sliding_window"),
        "use_sliding_window": get("attention.sliding_window") is not None,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [i for i in special if i is not None],
        "rope_parameters": {
            "rope_theta": get("rope.freq_base", 10000.0),
            "rope_type": {"none": "default"}.get(get("rope.scaling.type", "none"), get("rope.scaling.type")),
            "factor": get("rope.scaling.factor"),
            "attention_factor": get("rope.scaling.attn_factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "partial_rotary_factor": count("rope.dimension_count", head_dim) / head_dim,
        },
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_shards(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> dict[str, str]:
    """Write safetensors files of at most about :data:`SHARD_BYTES`; return the file of every tensor."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = count = 0

    def flush() -> None:
        nonlocal shard, size, count
        if shard:
            count += 1
            file_name = f"model-{count:05d}.safetensors"
            save_file(shard, folder / file_name)
            weight_map.update(dict.fromkeys(shard, file_name))
        shard, size = {}, 0

    for name, value in tensors:
        shard[name] = value.contiguous()
        size += value.nbytes
        if size >= SHARD_BYTES:
            flush()
    flush()
    return weight_map
