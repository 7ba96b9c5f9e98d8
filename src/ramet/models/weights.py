"""Weights of a checkpoint by name: which a model needs, and reading them from a folder of safetensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from ramet.errors import ModelError, Unsupported
from ramet.models.files import ModelFiles
from ramet.models.spec import ModelSpec

# Written by older exporters; they are derived from the configuration, or masks.
HARMLESS = re.compile(r".*\.(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias)$")
QUANTIZED = re.compile(
    r".*\.(qweight|qzeros|g_idx|weight_scale|weight_scale_inv|weight_packed|absmax|quant_map|blocks|scales|SCB)$"
)


class WeightSource(Protocol):
    """Tensors by Hugging Face name, read one at a time, so that a model never lies in memory twice."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return name and shape of every tensor without reading one."""
        ...

    def read(self, name: str) -> Tensor:
        """Return one tensor, in the checkpoint's dtype."""
        ...


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that the model needs."""
    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_size, kv_size = spec.num_qo_heads * head_dim, spec.num_kv_heads * head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, spec.attention_bias),
        "self_attn.k_proj": (kv_size, hidden, spec.attention_bias),
        "self_attn.v_proj": (kv_size, hidden, spec.attention_bias),
        "self_attn.o_proj": (hidden, q_size, spec.o_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if spec.qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def weight_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of all weights in memory; a tied head keeps a packed copy of the embedding besides it."""
    head = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    return itemsize * (head + sum(math.prod(shape) for shape in expected_shapes(spec).values()))


def check_weights(spec: ModelSpec, source: WeightSource, where: str) -> None:
    """Compare a checkpoint with what the model needs, before anything is read.

    Raises
    ------
    ModelError
        Naming the weights that are missing, surplus or misshaped.
    Unsupported
        If the names are those of a quantised format.
    """
    found, expected = source.shapes(), expected_shapes(spec)
    surplus = [name for name in found if name not in expected and not HARMLESS.match(name)]
    if spec.tie_word_embeddings:  # some exporters write the tied head too
        surplus = [name for name in surplus if name != "lm_head.weight"]
    quantized = [name for name in surplus if QUANTIZED.match(name)]
    if quantized:
        raise Unsupported(
            f"{where} holds quantised weights ({_some(quantized)}), which are not read: use the float16, bfloat16 or "
            "float32 weights of the model, or a GGUF file."
        )
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(f"{where} lacks {_some(missing)}: the checkpoint is incomplete or of another model.")
    if surplus:
        raise ModelError(f"{where} holds weights that {spec.architecture} does not have: {_some(surplus)}.")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelError(f"{where}: {name} has shape {tuple(found[name])}, but config.json asks for {shape}.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class SafetensorsFolder:
    """The ``*.safetensors`` of a folder: one file, or shards listed in ``model.safetensors.index.json``.

    Tensors are views of the mapped files; the mapping ends with the last of them.
    """

    def __init__(self, files: ModelFiles) -> None:
        if files.folder is None:
            raise ModelError(f"{files.name} is not a folder of safetensors.")
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Any] = {}
        for path in _safetensors_paths(files, files.folder):
            handle = _open(path)
            for name in handle.keys():  # noqa: SIM118  (no mapping: keys is all it has)
                self._shapes[name] = tuple(handle.get_slice(name).get_shape())
                self._file_of[name] = handle

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise Unsupported(
                f"{name} is {tensor.dtype}; only float16, bfloat16, float32 and float64 weights are read."
            )
        return tensor


def _safetensors_paths(files: ModelFiles, folder: Path) -> list[Path]:
    index = files.read_json("model.safetensors.index.json")
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder}/model.safetensors.index.json has no weight_map: fetch the model again.")
        paths = [folder / str(name) for name in dict.fromkeys(weight_map.values())]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ModelError(f"{folder} lacks the shards {_some(absent)}: fetch the model again.")
        return paths
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if others:
        raise Unsupported(f"{folder} holds {_some(others)}, but only safetensors are read: convert the weights.")
    raise ModelError(f"{folder} holds no *.safetensors: fetch the weights, or use load_format='dummy'.")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is not readable as safetensors ({error}): fetch the model again.") from None
