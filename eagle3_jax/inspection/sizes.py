"""A draft's sizes, switches, target states and vocabulary as rows of a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.config import DEFAULT_BOUNDARIES
from eagle3_jax.convert_report import LAYER_FIELDS, SIZES, SWITCHES
from eagle3_jax.files.shards import FileError
from eagle3_jax.inspection.serving import Served
from eagle3_jax.inspection.subject import Line, Subject, offsets
from eagle3_jax.source_config import SourceConfig
from eagle3_jax.tokenizer import Tokenizer

FIRST = 6
KEYS = {
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "num_aux": "num_aux_hidden_states",
}


def size_rows(subject: Subject) -> list[dict[str, Any]]:
    """Each size as used, where it is from, and what config.json says beside it."""
    source = SourceConfig(subject.manifest.get("source_config") or {}, "config.json")
    rows = []
    for name, letter in SIZES:
        key = KEYS.get(name, name)
        stated = source.layer(key) or source.top(key) or source.eagle_config(key)
        used = getattr(subject.config, name)
        rows.append(
            {
                "name": name,
                "letter": letter,
                "used": used,
                "origin": subject.manifest["origins"].get(name),
                "config": None if stated is None else stated.value,
                "agrees": stated is None or stated.value == used,
            }
        )
    return rows


def switch_rows(subject: Subject) -> list[dict[str, Any]]:
    """Each switch and where it is from."""
    config, origins = subject.manifest["config"], subject.manifest["origins"]
    told = [name for name in LAYER_FIELDS if config.get(name) and name in origins]
    return [
        {"name": name, "value": config.get(name), "origin": origins.get(name)}
        for name in (*SWITCHES, *told)
    ]


def draft_rows(subject: Subject, served: Sequence[Served]) -> list[dict[str, Any]]:
    """The target states by slot: the file's id, the boundary, and what each engine captures."""
    aux, config = subject.manifest["aux"], subject.config
    boundaries: Sequence[Any] = ("2", "L//2", "L-3")
    if config.aux_boundaries != DEFAULT_BOUNDARIES:
        boundaries = list(config.aux_boundaries)
    ids = aux.get("ids") or [None] * len(boundaries)
    rows = []
    for slot, (boundary, layer_id) in enumerate(zip(boundaries, ids, strict=True)):
        rows.append(
            {
                "slot": slot,
                "id": layer_id,
                "convention": aux.get("convention"),
                "boundary": boundary,
                "meaning": _meaning(boundary),
                "engines": {one.engine: _slot(one, slot, boundary) for one in served},
            }
        )
    return rows


def _meaning(boundary: Any) -> str:
    if boundary == "final_norm":
        return "after the final norm"
    return "the embeddings" if boundary == 0 else f"after block {boundary}"


def _slot(served: Served, slot: int, boundary: Any) -> Any:
    taken = served.captured
    if taken is None:
        return None
    if isinstance(taken, str):
        return boundary if taken == "default" and isinstance(boundary, str) else taken
    return taken[slot] if slot < len(taken) else None


def vocabulary_rows(subject: Subject, folder: Path) -> tuple[dict[str, Any], list[Line]]:
    """What d2t is, and its first rows with token text where `folder` has a tokenizer."""
    config, d2t = subject.config, subject.manifest["d2t"]
    targets, steps = subject.targets, offsets(subject)
    tokenizer, lines = None, []
    if (folder / "tokenizer.json").is_file():
        try:
            tokenizer = Tokenizer.from_folder(folder)
        except FileError as error:
            lines.append(Line("VOCAB_TEXT", "note", f"no token text: {error}"))
    rows = []
    for draft_id in range(min(FIRST, len(targets))):
        target_id = int(targets[draft_id])
        row: dict[str, Any] = {
            "draft": draft_id,
            "offset": int(steps[draft_id]),
            "target": target_id,
        }
        if tokenizer is not None and target_id < tokenizer.vocab_size:
            row["text"] = tokenizer.decode([target_id])
        rows.append(row)
    return {
        "kind": d2t.get("kind"),
        "origin": subject.manifest["origins"].get("draft_to_target"),
        "meaning": _class(subject, steps),
        "sorted": bool(np.all(np.diff(targets) > 0)),
        "range": [int(targets.min()), int(targets.max())],
        "coverage": config.draft_vocab_size / config.vocab_size,
        "first": rows,
    }, lines


def _class(subject: Subject, steps: np.ndarray) -> str:
    config = subject.config
    if steps.any():
        return "a map"
    if config.draft_vocab_size == config.vocab_size:
        return "identity: the whole vocabulary"
    return f"the first {config.draft_vocab_size} target ids only: suspicious"
