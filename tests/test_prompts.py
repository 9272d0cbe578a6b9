"""Prompts from arguments and files: what becomes ids, and one message for what can't."""

import json

import pytest
from tiny_text import ids_of, text_target

from eagle3_jax import prompts
from eagle3_jax.findings import ConvertError
from eagle3_jax.prompts import Prompt
from eagle3_jax.tokenizer import Tokenizer

MESSAGES = [{"role": "system", "content": "w9"}, {"role": "user", "content": "w7  w8"}]


@pytest.fixture(scope="module")
def chat(sglang_models, tmp_path_factory):
    folder = text_target(sglang_models / "target", tmp_path_factory.mktemp("chat") / "target")
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def base(sglang_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "target"
    return Tokenizer.from_folder(text_target(sglang_models / "target", folder, template=None))


def lines(path, *values) -> list[Prompt]:
    path.write_text("\n\n".join(json.dumps(v) for v in values) + "\n")
    return prompts.read_jsonl(path)


def test_every_kind_of_line(tmp_path, chat):
    found = lines(
        tmp_path / "p.jsonl",
        "w7 w8",
        {"prompt": "w7 w8", "question_id": 3},
        {"messages": MESSAGES},
        {"input_ids": [5, 6]},
        {"ids": [1, 1]},
    )
    assert [p.where.rpartition(", ")[2] for p in found] == [f"line {n}" for n in (1, 3, 5, 7, 9)]
    user = ids_of("<s> user w7 w8 assistant")
    assert prompts.encode(found, chat, raw=False) == [
        user,
        user,
        ids_of("<s> system w9 user w7 w8 assistant"),
        [5, 6],
        [1, 1],
    ]
    assert [p.label for p in found] == ["w7 w8", "w7 w8", "w7 w8", "5 6", "1 1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w7", "<s> w7"),
        ("<s> w7", "<s> w7"),
        ("<s> <s> w7", "<s> <s> w7"),
        ("w7 <s>", "<s> w7 <s>"),
    ],
)
def test_one_bos_however_the_text_comes(chat, base, text, expected):
    given = prompts.from_texts([text])
    assert prompts.encode(given, chat, raw=True) == [ids_of(expected)]
    assert prompts.encode(given, base, raw=False) == [ids_of(expected)]


def test_template_writes_the_only_bos(chat):
    assert prompts.encode(prompts.from_texts(["w7"]), chat, raw=False)[0].count(1) == 1


def test_unicode_line_separators_are_text(tmp_path):
    (tmp_path / "p.jsonl").write_text('"a\u2028b"\r\n"c"\n', encoding="utf-8")
    assert [p.text for p in prompts.read_jsonl(tmp_path / "p.jsonl")] == ["a\u2028b", "c"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        ("[1, 2]", "a list, expected a string or an object"),
        ("7", "a int, expected a string or an object"),
        ('""', "prompt is '', expected text"),
        ('{"prompt": 3}', "prompt is '3', expected text"),
        ('{"text": "a"}', "has 'text', expected one of prompt, messages, input_ids, ids"),
        ("{}", "has no key, expected one of"),
        ('{"prompt": "a", "ids": [1]}', "has 'prompt', 'ids', expected one of"),
        ('{"messages": "a"}', "messages is not a list of objects with role and content"),
        ('{"messages": [{"role": "user"}]}', "messages is not a list of objects"),
        ('{"ids": []}', r"'\[\]', expected a list of at least one token id"),
        ('{"ids": [1, true]}', "True is not a token id"),
        ('{"input_ids": [1, 2.0]}', "2.0 is not a token id"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path, line, message):
    (tmp_path / "p.jsonl").write_text(f'"first"\n{line}\n')
    with pytest.raises(ConvertError, match=rf"p\.jsonl, line 2: {message}") as caught:
        prompts.read_jsonl(tmp_path / "p.jsonl")
    assert caught.value.code == "PROMPTS"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[[1, 2],\n[3", r"ids\.json, line 2: not JSON"),
        ("[1, 2]", r"ids\.json: expected a JSON list of id lists, such as"),
        ('{"ids": [[1]]}', "expected a JSON list of id lists"),
        ("[]", "the list is empty"),
        ("[[1], []]", r"entry 1: '\[\]', expected a list of at least one token id"),
        ('[[1, "2"]]', "entry 0: '2' is not a token id"),
    ],
)
def test_bad_ids_files(tmp_path, content, message):
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(ConvertError, match=message):
        prompts.read_ids(tmp_path / "ids.json")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConvertError, match=r"none\.jsonl: cannot be read: No such file"):
        prompts.read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ConvertError, match="cannot be read: Is a directory"):
        prompts.read_ids(tmp_path)
    (tmp_path / "latin").write_bytes(b'"caf\xe9"')
    with pytest.raises(ConvertError, match="latin: not UTF-8 at byte 4"):
        prompts.read_jsonl(tmp_path / "latin")
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ConvertError, match="empty: no prompts"):
        prompts.read_jsonl(tmp_path / "empty")
    with pytest.raises(ConvertError, match="--prompt 2: the text is empty"):
        prompts.from_texts(["a", ""])


def test_conversations_need_a_template(chat, base, sglang_models, tmp_path):
    talk = [Prompt("here", messages=MESSAGES)]
    with pytest.raises(ConvertError, match="here: messages need a chat template, and the target"):
        prompts.encode(talk, base, raw=False)
    with pytest.raises(ConvertError, match="and --raw turns it off"):
        prompts.encode(talk, chat, raw=True)
    template = "{{ raise_exception('no system role') }}"
    strict = text_target(sglang_models / "target", tmp_path / "strict", template)
    with pytest.raises(ConvertError, match=r"here: .*the chat template fails: no system role"):
        prompts.encode(talk, Tokenizer.from_folder(strict), raw=False)


@pytest.mark.parametrize(
    ("ids", "new", "message"),
    [
        ([1, 128], 4, r"here: id 128 at position 1 is outside the target's vocabulary 0\.\.127"),
        ([-1], 4, "id -1 at position 0"),
        (
            [1] * 500,
            13,
            "500 tokens and --max-new-tokens 13 make 513 positions, the target has 512",
        ),
    ],
)
def test_sizes_are_checked_for_all_prompts_at_once(tiny_target, ids, new, message):
    given = [Prompt("first", ids=[1]), Prompt("here", ids=ids)]
    with pytest.raises(ConvertError, match=message):
        prompts.check_sizes(given, [[1], ids], tiny_target.config, new)
    prompts.check_sizes(given[:1], [[1] * 500], tiny_target.config, 12)
