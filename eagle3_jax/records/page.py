"""One page on a record: what it holds, what it takes on disk, what the checks say."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.config import DraftConfig
from eagle3_jax.records.capture import target_facts
from eagle3_jax.records.checks import Checks, check_for_draft, state_chunks
from eagle3_jax.records.last_state import last_slot, read_final_norm
from eagle3_jax.records.structure import check_fields
from eagle3_jax.records.types import Record


def describe(
    record: Record, path: Path, draft: DraftConfig | None = None, *, check: bool = True
) -> dict[str, Any]:
    """Everything `eagle3 record show` says, ready for JSON; reads every state once.

    Args:
      check: False takes the writer's findings and only looks at the first states of each sequence.

    Raises:
      RecordError: a record that cannot be used, or that the draft cannot read.
    """
    folder = record.embedding if record.embedding and record.embedding.is_dir() else None
    facts = target_facts(folder) if folder and (folder / "config.json").is_file() else {}
    norm = read_final_norm(folder)
    check_fields(record)
    checks = Checks(
        record.boundaries,
        record.kind,
        num_layers=record.num_layers,
        bos_token_id=facts.get("bos_token_id"),
        final_norm=norm,
    )
    slots = len(record.boundaries)
    tokens = rows = outputs = counted = masked = partial = placed = rounds = accepted = 0
    squares, finite = np.zeros(slots), 0
    tops: set[int] = set()
    tags: dict[str, int] = {}
    width, dtype = 0, ""
    for number, sequence in enumerate(record.sequences):
        where = f"sequence {number}" + (f" {sequence.name!r}" if sequence.name else "")
        checks.open(sequence, where)
        tokens += len(sequence.tokens)
        rows += len(sequence.aux)
        outputs += len(sequence.tokens) - sequence.prompt_length
        partial += sequence.first > 0
        placed += sequence.positions is not None
        width, dtype = sequence.aux.shape[2], sequence.aux.dtype.name
        if sequence.loss_mask is not None:
            masked += 1
            counted += int(sequence.loss_mask.sum())
        if sequence.rounds is not None:
            rounds += len(sequence.rounds)
            accepted += sum(r.accepted for r in sequence.rounds)
        tops.add(0 if sequence.top_ids is None else sequence.top_ids.shape[1])
        for tag in sequence.tags:
            tags[tag] = tags.get(tag, 0) + 1
        for first, chunk in state_chunks(sequence.aux):
            if check:
                checks.add_rows(first, chunk)
            good = chunk.astype(np.float32)[np.isfinite(chunk).all(axis=(1, 2))]
            squares += np.mean(np.square(good, dtype=np.float64), axis=2).sum(axis=0)
            finite += len(good)
            if not check:
                break
        checks.close()
    found_now = checks.finish() if check else ()
    found: dict[str, Any] = {
        "path": str(path),
        "sequences": len(record.sequences),
        "tokens": tokens,
        "output_tokens": outputs,
        "rows": rows,
        "boundaries": list(record.boundaries),
        "width": width,
        "dtype": dtype,
        "state_bytes": rows * slots * width * np.dtype(_dtype(dtype)).itemsize if dtype else 0,
        "kind": record.kind,
        "partial_sequences": partial,
        "multi_axis_positions": placed,
        "loss_masks": masked,
        "counted_tokens": counted,
        "top_logprobs": max(tops, default=0),
        "rounds": rounds,
        "accept_length": 1 + accepted / rounds if rounds else None,
        "tags": tags,
        "rms_rows": finite,
        "rms": [round(math.sqrt(s / finite), 6) if finite else None for s in squares],
        "last_state": _last_state(record, norm is not None),
        "vocab_size": record.vocab_size,
        "num_layers": record.num_layers,
        "embedding": None if record.embedding is None else str(record.embedding),
        "embedding_found": folder is not None,
        "findings": list(dict.fromkeys((*found_now, *record.findings))),
        "provenance": record.provenance,
    }
    if draft is not None:
        found["draft_slots"] = list(check_for_draft(record, draft))
    return found


def lines(found: dict[str, Any]) -> list[str]:
    """The page as text."""
    size = found["state_bytes"]
    rows = [
        ("record", found["path"]),
        ("sequences", f"{found['sequences']} ({found['kind']})"),
        ("tokens", f"{found['tokens']}, {found['output_tokens']} of them output"),
        ("states", f"{found['rows']} rows of {len(found['boundaries'])} x {found['width']}"),
        ("dtype", f"{found['dtype']}, {size} bytes ({human(size)})"),
        ("target", _target(found)),
        ("last state", found["last_state"]),
    ]
    if found["partial_sequences"]:
        rows.append(("context", f"partial in {found['partial_sequences']} sequences"))
    if found["multi_axis_positions"]:
        rows.append(("positions", f"on three axes in {found['multi_axis_positions']} sequences"))
    if found["loss_masks"]:
        rows.append(
            ("loss masks", f"{found['loss_masks']}, {found['counted_tokens']} tokens count")
        )
    if found["top_logprobs"]:
        rows.append(("logprobs", f"the best {found['top_logprobs']} of each row"))
    if found["rounds"]:
        text = f"{found['rounds']} of the engine, accept length {found['accept_length']:.3f}"
        rows.append(("rounds", text))
    if found["tags"]:
        rows.append(("tags", ", ".join(f"{k} ({v})" for k, v in sorted(found["tags"].items()))))
    if "draft_slots" in found:
        slots = ", ".join(map(str, found["draft_slots"]))
        rows.append(("draft", f"fits: its states are slots {slots}"))
    text = [f"{name:<11}{value}" for name, value in rows]
    text += ["", f"slot  boundary    RMS of {found['rms_rows']} rows"]
    for slot, (boundary, rms) in enumerate(zip(found["boundaries"], found["rms"], strict=True)):
        text.append(f"{slot:<6}{boundary!s:<12}{'-' if rms is None else format(rms, '.4g')}")
    text += ["", "checks: " + ("nothing found" if not found["findings"] else "")]
    return [*(t.rstrip() for t in text), *(f"  {line}" for line in found["findings"])]


def human(size: float) -> str:
    """Bytes in the unit a reader expects: 1.5 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _last_state(record: Record, decidable: bool) -> str:
    slot = last_slot(record.boundaries, record.num_layers)
    if slot is None:
        return "not captured"
    declared = "after" if record.boundaries[slot] == "final_norm" else "before"
    if not decidable:
        return (
            f"slot {slot}, declared {declared} the final norm; not decidable without its weight: "
            "the record's target folder has none here"
        )
    return f"slot {slot}, {declared} the final norm"


def _target(found: dict[str, Any]) -> str:
    vocab, layers = found["vocab_size"], found["num_layers"]
    text = f"vocabulary {vocab or 'unknown'}, {layers or 'unknown'} blocks"
    if found["embedding"] is None:
        return f"{text}, no folder"
    return f"{text}, {found['embedding']}" + ("" if found["embedding_found"] else " (not here)")


def _dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
