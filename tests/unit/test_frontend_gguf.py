"""Tokenizers built from GGUF metadata follow the file's own rule, or are refused by name."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest
from frontend_oracles import alphabet

from ramet.errors import ModelError, Unsupported
from ramet.frontend.gguf_tokenizer import build_tokenizer
from ramet.frontend.tokenizer import Tokenizer, load_tokenizer
from ramet.models.gguf_metadata import read_metadata


def gguf_bytes(metadata: dict) -> bytes:
    """A GGUF header with these values; written by hand, so that reading is tested against the format itself."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value: object) -> bytes:
        if isinstance(value, bool):
            return struct.pack("<I?", 7, value)
        if isinstance(value, int):
            return struct.pack("<II", 4, value)
        if isinstance(value, float):
            return struct.pack("<If", 6, value)
        if isinstance(value, str):
            return struct.pack("<I", 8) + text(value)
        assert isinstance(value, list)
        if isinstance(value[0], str):
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        if isinstance(value[0], float):
            return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
        return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)

    body = b"".join(text(k) + typed(v) for k, v in metadata.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(metadata)) + body


def tiny_metadata(pre: str | None, **more: object) -> dict:
    """A vocabulary of all bytes, digits merged in pairs and triples, and three control tokens."""
    digits = [a + b for a in "123" for b in "123"]
    triples = [pair + c for pair in digits for c in "123"]
    tokens = ["<s>", "</s>", "<|eot|>", "<user>", *alphabet(), *digits, *triples, "<pad0>"]
    merges = [f"{p[0]} {p[1]}" for p in digits] + [f"{t[:2]} {t[2]}" for t in triples]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(tokens) - 5), 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **more,
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


def tiny(tmp_path: Path, pre: str | None, **more: object) -> Tokenizer:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf_bytes(tiny_metadata(pre, **more)))
    return load_tokenizer(path)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["123123"]),
        ("smollm", list("123123")),
        ("qwen2", list("123123")),
        ("llama-bpe", ["123", "123"]),
        ("tekken", list("123123")),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(tmp_path: Path, pre: str, words: list[str]) -> None:
    tokenizer = tiny(tmp_path, pre)
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("123123")
    assert [word for word, _ in pieces] == words
    assert tokenizer.decode(tokenizer.encode("123123"), skip_special_tokens=True) == "123123"


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path, "qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


def test_llama3_starts_with_bos_once_and_smollm_without(tmp_path: Path) -> None:
    llama = tiny(tmp_path, "llama-bpe", **{"tokenizer.ggml.eot_token_id": 2})
    assert llama.encode("1")[0] == 0
    assert llama.encode("<s>1") == llama.encode("1")
    assert llama.encode("1", add_special_tokens=False) == llama.encode("1")[1:]
    assert llama.eos_token_ids == (1, 2)
    assert tiny(tmp_path, "llama-bpe", **{"tokenizer.ggml.add_bos_token": False}).encode("1")[0] != 0
    assert tiny(tmp_path, "smollm").encode("1")[0] != 0


def test_a_template_with_bos_gives_one_bos(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer = tiny(tmp_path, "llama-bpe", **{"tokenizer.chat_template": template})
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "1"}])
    assert ids == tokenizer.encode("1")
    assert ids.count(0) == 1


def test_user_defined_tokens_stay_in_the_text_and_control_tokens_leave_it(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path, "gpt-2")
    ids = tokenizer.encode("1<user><s>1", add_special_tokens=False)
    assert ids[1:3] == [3, 0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "1<user>1"
    assert tokenizer.special_ids == {0, 1, 2}


def test_unused_entries_are_never_made_and_stand_for_nothing(tmp_path: Path) -> None:
    tokenizer = tiny(tmp_path, "gpt-2")
    unused = len(tiny_metadata("gpt-2")["tokenizer.ggml.tokens"]) - 1
    assert unused not in tokenizer.encode("<pad0>")
    assert tokenizer.decode([unused]) == ""


@pytest.mark.parametrize("pre", ["deepseek-coder", "default", "nonsense", ""])
def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path, pre: str) -> None:
    with pytest.raises(Unsupported, match=repr(pre)):
        tiny(tmp_path, pre)


def test_a_missing_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"tokenizer\.ggml\.pre"):
        tiny(tmp_path, None)


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "plamo2"])
def test_another_kind_of_tokenizer_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Unsupported, match=repr(kind)):
        tiny(tmp_path, "gpt-2", **{"tokenizer.ggml.model": kind})


def test_merges_outside_the_vocabulary_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="do not fit together"):
        build_tokenizer(tiny_metadata("gpt-2") | {"tokenizer.ggml.merges": ["1 x-y"]}, tmp_path)


def test_metadata_equals_the_gguf_package(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_array("a.strings", ["x", "ü", ""])
    writer.add_array("a.floats", [0.5, -1.0])
    writer.add_bool("a.bool", True)
    writer.add_int64("a.long", -(2**40))
    writer.add_float64("a.double", 1e-300)
    writer.add_uint8("a.byte", 200)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_metadata(path)
    assert found == {
        "general.architecture": "llama",
        "a.strings": ["x", "ü", ""],
        "a.floats": [0.5, -1.0],
        "a.bool": True,
        "a.long": -(2**40),
        "a.double": 1e-300,
        "a.byte": 200,
    }


@pytest.mark.parametrize("size", [0, 3, 4, 20, 40, 200, 1000])
def test_a_cut_off_gguf_file_is_one_clear_error(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_bytes(tiny_metadata("gpt-2"))[:size])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load_tokenizer(path)


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        load_tokenizer(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


# --- SentencePiece in GGUF files -------------------------------------------------------------------------------------


def sentencepiece_metadata(**more: object) -> dict:
    """Controls, all bytes, then pieces whose score falls with their number, as SentencePiece numbers them."""
    pieces = ["\u2581" * k for k in (2, 4, 8, 3, 5, 1)] + [
        "he",
        "ll",
        "\u2581h",
        "hell",
        "\u2581he",
        "llo",
        "aba",
        "ab",
        "ba",
    ]
    pieces += ["\u2581hell", "\u2581a", "é", "漢", *"helaob.", "\u2581\u2581a"]
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(k) for k in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


def sentencepiece_encode(metadata: dict, text: str) -> list[int]:
    """SentencePiece's rule itself: join the best-scored neighbours, the leftmost of equals; the rest is bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {t: i for i, t in enumerate(tokens) if metadata["tokenizer.ggml.token_type"][i] == 1}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joins = [(-scores[ids[a + b]], k) for k, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not joins:
            break
        _, k = min(joins)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + b for b in part.encode()])]


def sentencepiece_file(tmp_path: Path, **more: object) -> Tokenizer:
    path = tmp_path / "spm.gguf"
    path.write_bytes(gguf_bytes(sentencepiece_metadata(**more)))
    return load_tokenizer(path)


def test_sentencepiece_joins_as_its_scores_say(tmp_path: Path) -> None:
    tokenizer, metadata = sentencepiece_file(tmp_path), sentencepiece_metadata()
    draw = random.Random(3)
    for _ in range(500):
        text = "".join(
            draw.choices(["hello", "hell", "ab", "a", "ba", " ", "  ", "      ", "é", "漢", "😀", "\n", "x", "."], k=9)
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_encode(metadata, text), text
        assert tokenizer.decode(ids) == text
        detokenizer = tokenizer.detokenizer()
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == text


def test_sentencepiece_starts_with_bos_and_a_space_unless_the_file_says_no(tmp_path: Path) -> None:
    assert sentencepiece_file(tmp_path).encode("hell")[0] == 1
    bare = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = sentencepiece_file(tmp_path, **bare)
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hell")] == ["hell"]
    assert tokenizer.decode(tokenizer.encode(" hell")) == " hell"


def test_sentencepiece_control_tokens_are_never_built_from_text_pieces(tmp_path: Path) -> None:
    tokenizer = sentencepiece_file(tmp_path)
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    assert tokenizer.decode([1, *tokenizer.encode("a", False), 2], skip_special_tokens=True) == "a"


def test_sentencepiece_without_scores_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="scores"):
        build_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.scores": []}, tmp_path)
    with pytest.raises(ModelError, match="1 scores"):
        build_tokenizer(sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0]}, tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokenizer.ggml.tokens": 5},
        {"tokenizer.ggml.tokens": [1, 2]},
        {"tokenizer.ggml.merges": [1]},
        {"tokenizer.ggml.token_type": ["x"]},
        {"tokenizer.ggml.eos_token_id": "x"},
        {"tokenizer.ggml.model": 5},
    ],
    ids=lambda wrong: str(wrong)[15:40],
)
def test_entries_of_another_type_are_named(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(ModelError, match=f"{next(iter(wrong))} is ") as caught:
        tiny(tmp_path, "smollm", **wrong)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_special_ids_outside_the_vocabulary_mean_none(tmp_path: Path) -> None:
    """Some files write 2 ** 32 - 1 for a token that the model does not have."""
    tokenizer = tiny(tmp_path, "smollm", **{"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.eot_token_id": 2})
    assert tokenizer.eos_token_ids == (2,)
