"""The tiny SGLang target with a tokenizer of whole words: id 17 is `w17`, between spaces."""

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} {{ m.role }} {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} assistant{% endif %}"
)
WORDS = [UNKNOWN, BOS, EOS, "user", "assistant", "system", *(f"w{i}" for i in range(6, 128))]


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def text_target(source: Path, folder: Path, template: str | None = TEMPLATE, **config) -> Path:
    """A copy of the target at `source` with a tokenizer that adds bos; keys change config.json."""
    folder.mkdir()
    shutil.copy(source / "model.safetensors", folder)
    raw = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(raw))
    backend = tokenizers.Tokenizer(
        WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=UNKNOWN)
    )
    backend.pre_tokenizer = WhitespaceSplit()
    backend.add_special_tokens([BOS, EOS])
    backend.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    backend.save(str(folder / "tokenizer.json"))
    keys = {"bos_token": BOS, "eos_token": EOS}
    if template is not None:
        keys["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return folder
