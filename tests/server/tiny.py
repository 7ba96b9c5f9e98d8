"""A folder with the tiny random model of the engine's tests, a tokenizer of bytes and a chat template."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from harness import TINY
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB = 300
EOS = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if think %}<think>{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "load_format": "dummy",
    "page_size": 4,
    "kv_cache_memory_bytes": 8 << 20,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "num_threads": 1,
}


@lru_cache
def tiny_folder() -> str:
    """Ids 0 to 255 are bytes in the order of the byte-level alphabet, 256 is EOS, the rest is padding."""
    folder = Path(mkdtemp(prefix="ramet-tiny-server-"))
    config = {**TINY, "vocab_size": VOCAB, "max_position_embeddings": 2048, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": TEMPLATE}))
    return str(folder)
