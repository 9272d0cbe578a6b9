"""Ids, text and chat templates: recorded answers of transformers and vLLM, then rule by rule."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_model import smollm2_folder
from tiny_gguf import LONE, SPECIAL, USER_DEFINED, tiny

from convert.from_gguf import convert
from eagle3_jax.files.source import FileError
from eagle3_jax.tokenizer import Tokenizer

RECORDED = json.loads(
    (Path(__file__).parent / "data" / "smollm2" / "prompts.json").read_text(encoding="utf-8")
)["results"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder())


def tokenizer(folder: Path, pre: str = "smollm", **keys) -> Tokenizer:
    model = tiny()
    model.keys |= {"tokenizer.ggml.pre": pre}
    model.keys |= {f"tokenizer.ggml.{k}": v for k, v in keys.items()}
    convert(model.write(folder / "tiny.gguf"), folder / "hf")
    return Tokenizer.from_folder(folder / "hf")


def texts(tok: Tokenizer, text: str) -> list[str]:
    return [tok.decode([i]) for i in tok.encode(text)]


@pytest.mark.smollm2
@pytest.mark.parametrize("recorded", RECORDED, ids=[r["prompt"][:20] for r in RECORDED])
def test_recorded_prompts(smollm2, recorded):
    text = smollm2.apply_chat_template(recorded["prompt"])
    assert text == recorded["text"]
    assert smollm2.encode(text) == recorded["ids"]
    assert smollm2.decode(recorded["ids"]) == recorded["text"]
    assert smollm2.decode(recorded["reply_ids"], skip_special_tokens=True) == recorded["reply"]


@pytest.mark.smollm2
def test_real_digits_stand_alone(smollm2):
    digits = {str(d): smollm2.encode(str(d)) for d in range(10)}
    assert all(len(ids) == 1 for ids in digits.values())
    assert smollm2.encode("1984") == [i for d in "1984" for i in digits[d]]


@pytest.fixture(scope="module")
def all_bytes(tmp_path_factory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("tiny"))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_comes_back_and_pieces_join_to_it(all_bytes, text):
    ids = all_bytes.encode(text)
    pieces = all_bytes.pieces(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == all_bytes.decode(ids) == text


@given(st.lists(st.integers(0, len(tiny().tokens) - 1), max_size=30))
def test_pieces_of_any_ids_join_to_their_text(all_bytes, ids):
    assert "".join(all_bytes.pieces(ids)) == all_bytes.decode(ids)


def test_pieces_of_a_character_in_several_tokens(tmp_path):
    tok = tokenizer(tmp_path)
    assert tok.pieces(tok.encode("aé😀b")) == ["a", "", "é", "", "", "", "😀", "b"]
    assert tok.pieces(tok.encode("😀")[:3]) == ["", "", "\ufffd"]
    assert tok.pieces(tok.encode("é")[:1] + tok.encode("b")) == ["", "\ufffdb"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("gpt-2", "1234", ["1234"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("smollm", "he he", ["he", " he"]),
        ("gpt-2", "he's", ["he", "'s"]),
        ("gpt-2", "he'S", ["he", "'", "S"]),
        ("llama-bpe", "he'S", ["he", "'S"]),
        ("gpt-2", LONE, list(LONE)),
        ("smollm", LONE, list(LONE)),
        ("llama-bpe", LONE, [LONE]),
        ("gpt-2", "(he", ["(", "he"]),
        ("smollm", "a<|eos|>b", ["a", "<|eos|>", "b"]),
    ],
)
def test_words(tmp_path, pre, text, expected):
    assert texts(tokenizer(tmp_path, pre), text) == expected


def test_special_tokens_are_added_only_on_request(tmp_path):
    tok = tokenizer(tmp_path, add_bos_token=True, add_eos_token=True)
    assert tok.encode("he") == tok.encode("<|bos|>he<|eos|>")[1:-1]
    assert tok.encode("he", add_special_tokens=True) == tok.encode("<|bos|>he<|eos|>")
    assert tok.decode(tok.encode("he", add_special_tokens=True), skip_special_tokens=True) == "he"


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("gpt-2", False)])
def test_whether_bos_is_added_when_the_file_is_silent(tmp_path, pre, adds):
    tok = tokenizer(tmp_path, pre)
    expected = tok.encode("<|bos|>he") if adds else tok.encode("he")
    assert tok.encode("he", add_special_tokens=True) == expected


def test_user_defined_tokens_are_no_special_ones(tmp_path):
    model = tiny()
    model.types[model.tokens.index(LONE)] = USER_DEFINED
    convert(model.write(tmp_path / "tiny.gguf"), tmp_path / "hf")
    tok = Tokenizer.from_folder(tmp_path / "hf")
    ids = tok.encode(f"a{LONE}")
    assert len(ids) == 2
    assert tok.decode([*ids, 1], skip_special_tokens=True) == f"a{LONE}"


def test_vocabulary_and_ids_outside_it(tmp_path):
    tok = tokenizer(tmp_path)
    assert tok.vocab_size == len(tiny().tokens)
    for wrong in (-1, tok.vocab_size):
        with pytest.raises(ValueError, match=f"id {wrong} is not in a vocabulary"):
            tok.decode([5, wrong])


def rendered(folder: Path, template: object, messages: object = "he", **keywords) -> str:
    file = folder / "hf" / "tokenizer_config.json"
    if not file.exists():
        tokenizer(folder)
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"chat_template": template}))
    return Tokenizer.from_folder(folder / "hf").apply_chat_template(messages, **keywords)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['role'] }}:{{ messages[0].content }}", "<|bos|>user:he"),
        ("{% if add_generation_prompt %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}", "x\n"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ cls_token is defined }}", "False"),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_templates(tmp_path, template, expected):
    assert rendered(tmp_path, template) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only user and assistant') }}", "fails: only user and assistant"),
        ("{{ messages.append(1) }}", "fails: .*unsafe"),
        ("{{ ''.__class__.__mro__ }}", "fails: .*unsafe"),
        ("{{ messages[0].content + 1 }}", "fails: can only concatenate"),
        ("{% if %}", "does not compile"),
        (None, "has no chat template"),
    ],
)
def test_templates_that_fail(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        rendered(tmp_path, template)


def test_where_the_template_comes_from(tmp_path):
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert rendered(tmp_path, named) == "d"
    with pytest.raises(FileError, match="named 'default'"):
        rendered(tmp_path, named[:1])
    (tmp_path / "hf" / "chat_template.jinja").write_text("file")
    assert rendered(tmp_path, "config") == "file"


def test_token_written_as_an_object(tmp_path):
    tokenizer(tmp_path)
    file = tmp_path / "hf" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"eos_token": {"content": "</s>", "lstrip": False}}))
    tok = Tokenizer.from_folder(tmp_path / "hf")
    assert tok.special_tokens == {
        "bos_token": SPECIAL[0],
        "eos_token": "</s>",
        "pad_token": SPECIAL[2],
    }


@pytest.mark.smollm2
def test_a_conversation_equals_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = smollm2_folder()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    messages = [
        {"role": "system", "content": "Short answers.\n"},
        {"role": "user", "content": "  What is 12 × 34?\t"},
        {"role": "assistant", "content": "408 — naïve 😀"},
        {"role": "user", "content": "def f(x):\n    return x ** 2\n\n\n# it's DON'T"},
    ]
    for generation in (True, False):
        text = ours.apply_chat_template(messages, add_generation_prompt=generation)
        arguments = {"add_generation_prompt": generation, "tokenize": False}
        assert text == theirs.apply_chat_template(messages, **arguments)
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)


def test_missing_or_damaged_files(tmp_path):
    with pytest.raises(FileError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_missing_packages_name_the_extra(tmp_path, monkeypatch):
    tok = tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(FileError, match=r"jinja2 package: pip install 'eagle3-jax\[tokenizer\]'"):
        tok.apply_chat_template("he")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(FileError, match=r"tokenizers package: pip install"):
        Tokenizer.from_folder(tmp_path / "hf")
