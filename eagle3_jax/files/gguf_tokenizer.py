"""The tokenizer in a GGUF file, as tokenizer.json and tokenizer_config.json."""

import collections
import dataclasses
from typing import Any

from eagle3_jax.files.gguf_file import GgufFile
from eagle3_jax.files.source import FileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""llama.cpp's `llama_token_type`, without BYTE, which a byte-level vocabulary has no use for."""

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Meta's Llama 3 tokenizer.json splits text into words."""


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


@dataclasses.dataclass(frozen=True)
class Words:
    """How text is split before BPE, by the name in `tokenizer.ggml.pre`.

    Attributes:
      steps: pre-tokenizers of the `tokenizers` library, in order.
      ignore_merges: a word that is a token is taken whole.
      add_bos: whether a file without `add_bos_token` starts text with bos.
    """

    steps: tuple[dict[str, Any], ...]
    ignore_merges: bool = False
    add_bos: bool = False


PRE_TOKENIZERS = {
    "gpt-2": Words((_byte_level(True),)),
    "smollm": Words(({"type": "Digits", "individual_digits": True}, _byte_level(True))),
    "llama-bpe": Words(
        (
            {
                "type": "Split",
                "pattern": {"Regex": LLAMA3_WORDS},
                "behavior": "Isolated",
                "invert": False,
            },
            _byte_level(False),
        ),
        ignore_merges=True,
        add_bos=True,
    ),
}


@dataclasses.dataclass(frozen=True)
class GgufTokenizer:
    """Contents of the tokenizer files, and the ids that config.json repeats."""

    tokenizer: dict[str, Any]
    config: dict[str, Any]
    bos: int | None
    eos: tuple[int, ...]
    pad: int | None


def read_tokenizer(file: GgufFile, vocab_size: int) -> GgufTokenizer:
    """Builds a byte-level BPE tokenizer for the `tokenizers` library.

    Raises:
      FileError: another tokenizer model or word splitting, a token list that does not fit the
        embedding, tokens given twice, merges of unknown tokens, ids outside the vocabulary.
    """
    words = _words(file)
    tokens, types = _tokens(file, vocab_size)
    merges = _merges(file, set(tokens))
    ids = {
        name: _id(file, f"tokenizer.ggml.{key}_token_id", vocab_size)
        for name, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("eot", "eot"),
            ("eom", "eom"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    bos, eos = ids["bos"], ids["eos"]
    add_bos = file.optional("tokenizer.ggml.add_bos_token", bool, words.add_bos)
    add_eos = file.optional("tokenizer.ggml.add_eos_token", bool, False)
    before = [bos] if add_bos else []
    after = [eos] if add_eos else []
    around = [i for i in (*before, *after) if i is not None]
    if len(around) != len(before) + len(after):
        raise FileError(f"{file.path}: bos or eos is to be added to text but has no id")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, tokens[i], special=kind != USER_DEFINED)
            for i, kind in enumerate(types)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(words.steps)},
        "post_processor": _post_processor(tokens, around, len(before)) if around else None,
        "decoder": _byte_level(True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": words.ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.value("llama.context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
    }
    for name in ("bos", "eos", "unk", "pad"):
        i = ids[name]
        if i is not None:
            config[f"{name}_token"] = tokens[i]
    if "tokenizer.chat_template" in file.fields:
        config["chat_template"] = file.value("tokenizer.chat_template", str)
    stops = tuple(dict.fromkeys(i for i in (eos, ids["eot"], ids["eom"]) if i is not None))
    return GgufTokenizer(tokenizer, config, bos, stops, ids["pad"])


def _words(file: GgufFile) -> Words:
    model = file.value("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise FileError(
            f"{file.path}: tokenizer.ggml.model is {model!r}, supported: 'gpt2' (byte-level BPE)"
        )
    pre = file.value("tokenizer.ggml.pre", str)
    if pre not in PRE_TOKENIZERS:
        raise FileError(
            f"{file.path}: tokenizer.ggml.pre is {pre!r}, supported: {', '.join(PRE_TOKENIZERS)}"
        )
    if file.optional("tokenizer.ggml.add_space_prefix", bool, False):
        raise FileError(f"{file.path}: tokenizer.ggml.add_space_prefix is true, expected false")
    return PRE_TOKENIZERS[pre]


def _tokens(file: GgufFile, vocab_size: int) -> tuple[list[str], list[int]]:
    tokens = file.value("tokenizer.ggml.tokens", list)
    types = file.value("tokenizer.ggml.token_type", list)
    if not len(tokens) == len(types) == vocab_size:
        raise FileError(
            f"{file.path}: {len(tokens)} tokens and {len(types)} token types for an embedding of "
            f"{vocab_size} rows"
        )
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED):
            raise FileError(f"{file.path}: token {i} {token!r} has type {kind}, expected 1 to 5")
    if len(set(tokens)) != len(tokens):
        twice = collections.Counter(tokens).most_common(1)[0][0]
        raise FileError(f"{file.path}: token {twice!r} is given twice")
    return tokens, types


def _merges(file: GgufFile, vocab: set[str]) -> list[list[str]]:
    merges = []
    for number, text in enumerate(file.value("tokenizer.ggml.merges", list)):
        pair = text.split(" ") if isinstance(text, str) else []
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab:
            raise FileError(
                f"{file.path}: merge {number} is {text!r}, expected two tokens that join to a third"
            )
        merges.append(pair)
    return merges


def _id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    if key not in file.fields:
        return None
    value = file.value(key, int)
    if not 0 <= value < vocab_size:
        raise FileError(f"{file.path}: {key} is {value}, outside a vocabulary of {vocab_size}")
    return value


def _added_token(i: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": i,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _post_processor(tokens: list[str], around: list[int], before: int) -> dict[str, Any]:
    special = [{"SpecialToken": {"id": tokens[i], "type_id": 0}} for i in around]

    def wrapped(sequence: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": 0}}
        return [*special[:before], text, *special[before:]]

    return {
        "type": "TemplateProcessing",
        "single": wrapped("A"),
        "pair": wrapped("A") + wrapped("B"),
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in around
        },
    }
